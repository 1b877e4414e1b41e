"""Owns one agent's replay: the ring, its sum tree, its streams and its limiter, as one thing without sockets.

Everything that matters is in the ring's files; the tree and the counts are rebuilt from them at the start.
leaf = drawable ? (|td| + epsilon)^alpha : 0, and a new step has the largest |td| seen so far. Draw i is a
pure function of (seed, agent, i) and of what is stored, so a repeated request gives the same batch.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.replay import kernels
from services.replay.batches import BatchMaker
from services.replay.limiter import Limiter
from services.replay.records import Array, Ints
from services.replay.ring import Ring
from services.replay.streams import Streams
from services.replay.sum_tree import Leaves, SumTree
from shared.codec import pack_segment, segment_checksum
from shared.errors import Refused, SpecMismatch, StaleToken
from shared.layout import MAX_BYTES, Arrays, Block, Layout, Packed
from shared.segment_frame import AnySegment
from shared.specs import AgentSpec

Verdict = Literal["stored", "duplicate", "gap"]
FIRST_PRIORITY = 1.0


class AgentBuffer:
    """What one agent's actors insert and its learner draws."""

    def __init__(
        self,
        directory: Path,
        agent: str,
        spec: AgentSpec,
        *,
        capacity_steps: int,
        segment_steps: int,
        n_step: int,
        gamma: float,
        alpha: float,
        priority_epsilon: float,
        min_steps: int,
        samples_per_insert: float,
        tolerance_samples: float,
        seed: int,
        interval_steps: int = 1,
        max_batch_bytes: int = MAX_BYTES,
        now: float | None = None,
    ) -> None:
        self.agent, self.spec = agent, spec
        self.segment_steps, self.n_step = segment_steps, n_step
        self.alpha, self._epsilon = alpha, np.float32(priority_epsilon)
        self._key = _draw_key(seed, agent)
        self._ring = Ring(directory, spec, -(-capacity_steps // segment_steps), segment_steps, n_step)
        self._state = self._ring.state
        self._batches = BatchMaker(self._ring, gamma, max_batch_bytes)
        self._streams = Streams(directory / "streams", _monotonic(now))
        self._tree = SumTree(self.capacity_steps)
        self.limiter = Limiter(min_steps, samples_per_insert, tolerance_samples, interval_steps)
        self._recover(_monotonic(now))

    # --- inserting ----------------------------------------------------------------------------------------

    def insert(self, segment: AnySegment, arrays: Arrays | Block, now: float | None = None) -> Verdict:
        """Stores the next segment of its stream; nothing is written for one that is refused."""
        packed = self._check(segment, arrays)
        judgement = self._streams.judge(segment.incarnation, segment.sequence)
        if judgement != "next":
            self._state[f"{judgement}s_dropped"] += segment.owned
            return judgement
        self._check_contents(segment, packed)
        stored = self._streams.stored_steps_of(segment.incarnation) + segment.owned
        freed = self._ring.insert(
            segment,
            packed,
            stored_after=stored,
            priority=self.max_priority,
            tree=self._tree,
            leaf=self._new_leaf,
        )
        self._streams.advance(
            segment.incarnation, segment.sequence, stored, segment.produced_steps, _monotonic(now)
        )
        self.limiter.drawable_steps += segment.owned - freed
        self.limiter.inserted_steps = self._streams.stored_steps
        self.limiter.full = self._ring.full
        return "stored"

    def check(self, segment: AnySegment, arrays: Arrays | Block) -> Packed:
        """The arrays as they travelled, if they are this segment's in every respect; else SpecMismatch."""
        packed = self._check(segment, arrays)
        self._check_contents(segment, packed)
        return packed

    def _check(self, segment: AnySegment, arrays: Arrays | Block) -> Packed:
        """The arrays as they travelled, if they can be this segment's by their types and shapes."""
        if segment.agent != self.agent:
            raise SpecMismatch(f"a segment of {segment.agent!r} for the buffer of {self.agent!r}")
        if problem := self._ring.misfit(segment.before, segment.owned, segment.rows):
            raise SpecMismatch(f"segment {segment.sequence}: {problem}")
        layout = self._ring.segment_layout(segment.rows)
        if isinstance(arrays, np.ndarray):
            return self._unpacked(segment, arrays, layout)
        packed = pack_segment(self.spec, arrays)
        if packed.layout.text != layout.text:
            raise SpecMismatch(
                f"segment {segment.sequence}: {packed.layout.text[:1_000]} where {layout.text} was expected"
            )
        return packed

    def _unpacked(self, segment: AnySegment, block: Block, layout: Layout) -> Packed:
        """Arrays from the wire, which says what they are with a digest alone."""
        if segment.layout != layout.digest:
            raise SpecMismatch(
                f"segment {segment.sequence}: its arrays are others; {layout.text} was expected"
            )
        if block.nbytes != layout.nbytes:
            raise SpecMismatch(
                f"segment {segment.sequence}: arrays of {block.nbytes} bytes; {layout.text} needs "
                f"{layout.nbytes}"
            )
        return Packed(layout, block)

    def _check_contents(self, segment: AnySegment, packed: Packed) -> None:
        found = segment_checksum(packed)
        if found != segment.checksum:
            raise SpecMismatch(
                f"segment {segment.sequence}: checksum {found}, its header says {segment.checksum}"
            )
        if flaw := self._ring.flaw(packed, segment.rows):
            raise SpecMismatch(f"segment {segment.sequence}: {flaw}")

    # --- drawing ------------------------------------------------------------------------------------------

    def draw(
        self, draw_index: int, batch_size: int, beta: float, *, count: bool = True, tray: Block | None = None
    ) -> Packed:
        """Draw number `draw_index`: a stratified batch, on the tray if it fits there (its block says so).

        `count` is false when it was served before.
        """
        if not self.drawable_steps:
            raise Refused(
                "empty", f"the buffer of {self.agent!r} has no steps to draw; wait until can_sample"
            )
        if not self._tree.total > 0.0:
            raise ValueError("nothing to draw: every leaf is 0")
        batch = self._batches.draw(batch_size, self._key, draw_index, self._tree, tray)
        # (N P)^-beta over its maximum, which is the rarest row's: N and the total cancel.
        weight = batch["weight"]
        np.power(weight, -beta, out=weight)
        if count:
            self._state["sampled_steps"] += batch_size
            self.limiter.sampled_steps += batch_size
        return batch

    def rows(self, index: Ints) -> Packed:
        """These rows as a batch in which all weigh the same."""
        batch, address = self._batches.empty(len(index))
        batch["index"][:] = index
        batch["weight"][:] = 1.0
        self._batches.gather(batch, address)
        return batch

    # --- priorities ---------------------------------------------------------------------------------------

    def update_priorities(self, index: Array, generation: Array, priority: Array) -> int:
        """New |td| of drawn rows; how many were ignored: overwritten since, out of range or not a number."""
        check_update(index, generation, priority)
        if priority.dtype != np.float32:
            with np.errstate(over="ignore"):
                priority = priority.astype(np.float32)
        index, generation, priority = _behaved(index), _behaved(generation), _behaved(priority)
        accepted, kept = np.empty(len(index), np.int64), np.empty(len(index), np.float32)
        ring = self._ring
        if ring.watcher is not None:
            ring.watcher.before_update(index // self.segment_steps)
        count, highest = kernels.accept_priorities(
            index, generation, priority, ring.places, ring.priorities, accepted, kept
        )
        if count:
            self._tree.set_checked(accepted[:count], self._leaves(kept[:count]))
            if highest > self.max_priority:
                self._keep_max_priority(highest)
        stale = len(index) - count
        if stale:
            self._state["stale_priorities"] += stale
        return stale

    def _keep_max_priority(self, priority: float) -> None:
        """The largest |td| so far is what a new step is given."""
        self._state["max_priority"] = self.max_priority = priority
        self._new_leaf = self._leaves(np.full(1, priority, np.float32)).item()

    def _leaves(self, raw: Array) -> Leaves:
        leaves: Leaves = np.power(raw + self._epsilon, self.alpha)
        return leaves

    # --- coming back --------------------------------------------------------------------------------------

    def _recover(self, now: float) -> None:
        valid = self._ring.valid_slots()
        self._streams.recover(self._ring.metadata[valid], now)
        kept = self._state["max_priority"]
        if not (math.isfinite(kept) and kept > 0):
            self._state["max_priority"] = FIRST_PRIORITY
        self._keep_max_priority(self._state["max_priority"])
        self._recover_priorities(valid)
        self._recover_limiter(valid)

    def _recover_priorities(self, valid: Ints) -> None:
        ring, leaves = self._ring, np.zeros((self._ring.slots, self.segment_steps), np.float32)
        foreign = valid[ring.priority_generation[valid] != ring.commit[valid]]
        ring.priorities[foreign] = self.max_priority
        ring.priority_generation[foreign] = ring.commit[foreign]
        raw = ring.priorities[valid]
        raw = np.where(np.isfinite(raw) & (raw >= 0), raw, np.float32(self.max_priority))
        drawable = np.arange(self.segment_steps) < ring.metadata["owned"][valid][:, None]
        leaves[valid] = np.where(drawable, self._leaves(raw), np.float32(0))
        self._tree.rebuild(leaves.ravel())

    def _recover_limiter(self, valid: Ints) -> None:
        limiter, state = self.limiter, self._state
        limiter.drawable_steps = int(self._ring.metadata["owned"][valid].sum())
        limiter.inserted_steps = self._streams.stored_steps
        limiter.sampled_steps = state["sampled_steps"]
        limiter.full = self._ring.full
        limiter.offset = state["limiter_offset"]
        before = (state["samples_per_insert"], state["min_steps"])
        config = (limiter.samples_per_insert, limiter.min_steps)
        if config == (state["config_samples_per_insert"], state["config_min_steps"]):
            limiter.samples_per_insert, limiter.min_steps = before  # changed while running, perhaps
        elif before not in ((0.0, 0), config):
            limiter.rebase()
        if not math.isfinite(limiter.offset):  # it died while it was being set
            limiter.offset = 0.0
            limiter.rebase()
        self._keep_limiter()
        state["config_samples_per_insert"], state["config_min_steps"] = config  # after what it stands for

    def _keep_limiter(self) -> None:
        # An offset belongs to its ratio: until all of them are new, who opens the files starts at balance.
        self._state["limiter_offset"] = math.nan
        self._state["samples_per_insert"] = self.limiter.samples_per_insert
        self._state["min_steps"] = self.limiter.min_steps
        self._state["limiter_offset"] = self.limiter.offset

    # --- what others ask ----------------------------------------------------------------------------------

    @property
    def ring(self) -> Ring:
        """Where the rows lie; for snapshots."""
        return self._ring

    def stream_bytes(self) -> bytes:
        """The table of marks; for snapshots."""
        return self._streams.as_bytes()

    @property
    def drawable_steps(self) -> int:
        return self.limiter.drawable_steps

    @property
    def capacity_steps(self) -> int:
        return self._ring.slots * self.segment_steps

    @property
    def inserted_steps(self) -> int:
        return self.limiter.inserted_steps

    @property
    def sampled_steps(self) -> int:
        return self.limiter.sampled_steps

    def mark(self, incarnation: str) -> int:
        """The last number of this stream that is stored."""
        return self._streams.mark(incarnation)

    def report(self, incarnation: str, produced: int, final: bool, now: float) -> None:
        """An actor's own count."""
        self._streams.report(incarnation, produced, final, now)

    def check_token(self, number: int) -> None:
        """Refuses tokens lower than the highest that was granted."""
        highest = self._state["token"]
        if number < highest:
            raise StaleToken(
                f"token {number} for {self.agent!r}, where {highest} has been granted; ask for a new lease"
            )

    def note_token(self, number: int) -> None:
        """A lease was granted: tokens below it are refused from now on."""
        self._state["token"] = max(self._state["token"], number)

    def forgive(self) -> None:
        """Writes off samples that are owed while no learner lives."""
        self.limiter.forgive()
        self._keep_limiter()

    def adjust_limiter(
        self,
        *,
        min_steps: int | None = None,
        samples_per_insert: float | None = None,
        tolerance_samples: float | None = None,
    ) -> None:
        """New settings, which stay until the config itself says something else."""
        self.limiter.adjust(
            min_steps=min_steps, samples_per_insert=samples_per_insert, tolerance_samples=tolerance_samples
        )
        self._keep_limiter()

    def ledger(self, now: float, lease_s: float, closing: bool = False) -> dict[str, int]:
        """This agent's share of every figure of the `Ledger` message."""
        return {
            **asdict(self._streams.ledger(now, lease_s, closing)),
            "duplicates_dropped": self._state["duplicates_dropped"],
            "stored_twice": self._ring.stored_twice(),
        }

    def produced_by(self) -> dict[str, int]:
        """Steps of this agent by incarnation, as the actors said."""
        return self._streams.produced_by()

    def stats(self) -> dict[str, float]:
        """The figures of `BufferStats` that a buffer knows by itself."""
        return {
            "drawable_steps": self.drawable_steps,
            "capacity_steps": self.capacity_steps,
            "inserted_steps": self.inserted_steps,
            "sampled_steps": self.sampled_steps,
            "stale_priorities": self._state["stale_priorities"],
            "max_priority": self.max_priority,
        }

    def counters(self) -> dict[str, int]:
        """What had to be refused or dropped so far, in steps (damaged slots in slots)."""
        return {name: self._state[name] for name in ("duplicates_dropped", "gaps_dropped", "damaged_slots")}

    def sync(self) -> None:
        """Puts everything on the disk; from any thread."""
        self._ring.sync()
        self._streams.sync()


def _monotonic(now: float | None) -> float:
    return time.monotonic() if now is None else now


def _behaved(array: Array) -> Array:
    """Views on frames may lie at odd addresses or be read-only; kernels would be compiled for those again."""
    return array if array.flags.behaved else array.copy()


def _draw_key(seed: int, agent: str) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{agent}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def check_update(index: Array, generation: Array, priority: Array) -> None:
    """Refuses arrays that cannot be an update of priorities, before anything is done with them."""
    for array, dtypes in (
        (index, (np.int64,)),
        (generation, (np.uint64,)),
        (priority, (np.float32, np.float64)),
    ):
        if array.ndim != 1 or array.dtype not in dtypes or len(array) != len(index):
            names = " or ".join(dtype.__name__ for dtype in dtypes)
            raise SpecMismatch(
                f"a priority update with {array.dtype}{list(array.shape)} where {names}[n] was expected"
            )
