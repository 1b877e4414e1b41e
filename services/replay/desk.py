"""One agent's buffer with everybody who waits at it: its learner's requests, and actors that are held back.

It knows no sockets: the service tells it what has come, and sends what it answers.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.replay.buffer import AgentBuffer, check_update
from services.replay.opening import tolerance_samples
from services.replay.rounds import RoundBuffer
from shared.codec import Received
from shared.config import Config
from shared.errors import BadMessage, NoTray, Refused, StaleToken
from shared.layout import Array, Block, Packed
from shared.links.trays import TrayTable
from shared.messages import (
    Batch,
    BufferStats,
    LimiterStats,
    PhaseRequest,
    PriorityUpdate,
    SampleRequest,
    Token,
)

REMEMBERED_DRAWS = 256
HOLD_SHARE = 0.9  # of its deadline a request is held
MOST_UNPROVEN = 64  # requests that wait for the notice of their lease

_NO_ROWS: dict[str, Array] = {
    "index": np.empty(0, np.int64),
    "generation": np.empty(0, np.uint64),
    "priority": np.empty(0, np.float32),
}

DrawKey = tuple[bytes, int, int]  # a learner, its token's number and a draw: one batch, however often asked


@dataclass(slots=True, eq=False)
class HeldSample:
    """A sample request that waits for its turn."""

    peer: bytes
    message: SampleRequest
    until: float
    key: DrawKey


@dataclass(slots=True, eq=False)
class HeldPhase:
    """A learner that waits for a round to be stored."""

    peer: bytes
    message: PhaseRequest
    until: float


Held = HeldSample | HeldPhase


@dataclass(slots=True)
class AgentDesk:
    """What waits, what was served, and what may be answered now."""

    buffer: AgentBuffer
    trays: TrayTable  # its learner's
    rounds: RoundBuffer | None = None  # in lockstep: decides what enters and what is drawn
    phases: list[HeldPhase] = field(default_factory=list)
    held: dict[DrawKey, HeldSample] = field(default_factory=dict)  # in the order of their coming
    served: OrderedDict[DrawKey, None] = field(default_factory=OrderedDict)  # the newest of them
    withheld: set[str] = field(default_factory=set)  # incarnations whose acknowledgements wait
    granted: float = math.inf  # the number of the newest lease, as far as is known: any may be it at first
    learner_heard: float = -1e9
    absent: bool = True  # no learner: what inserts run ahead is forgiven when one comes
    blocked: str = ""
    blocked_since: float = 0.0

    # --- who waits ----------------------------------------------------------------------------------------

    def hear_learner(self) -> None:
        """The agent's learner has spoken."""
        self.learner_heard = time.monotonic()
        if self.absent:
            self.absent = False
            self.buffer.forgive()

    def proven(self, token: Token) -> bool:
        """Whether it is the newest lease's, or may be: a lease's first request can be faster than the notice
        of it, and waits for that."""
        return token.number <= self.granted

    @property
    def waiting(self) -> list[Held]:
        """All requests that are held."""
        return [*self.held.values(), *self.phases]

    @property
    def unproven(self) -> int:
        """How many wait for the notice of their lease."""
        return sum(not self.proven(held.message.token) for held in self.waiting)

    def note_lease(self, number: int, holder: bytes) -> list[tuple[Held, Refused]]:
        """This is the newest lease (of nobody, if it was given back). Whoever claims it and does not hold it,
        and whoever holds an older one, waits no longer."""
        self.granted = number
        self.buffer.note_token(number)
        refused: list[tuple[Held, Refused]] = []
        for held in self.waiting:
            claimed = held.message.token.number
            try:
                self.buffer.check_token(claimed)
            except StaleToken as error:
                refused.append((held, error))
            else:
                if claimed == number and holder and held.peer != holder:
                    refused.append((held, not_the_holder(self.buffer.agent)))
        self._forget([held for held, _error in refused])
        return refused

    def hold_sample(self, peer: bytes, received: Received, message: SampleRequest) -> None:
        """A request for a batch waits from now on; the priorities that ride on it are taken at once."""
        key = peer, message.token.number, message.draw
        if key in self.held:
            return  # the learner repeats itself
        self._check_room(message.token)
        if received.arrays and key not in self.served:
            self.buffer.update_priorities(*update_in(received, welcome=self.rounds is None))
        self.held[key] = HeldSample(peer, message, time.monotonic() + HOLD_SHARE * message.deadline_s, key)

    def hold_phase(self, peer: bytes, message: PhaseRequest) -> None:
        """A learner waits from now on for a round to be stored; a repeated request waits once."""
        before = peer, message.request
        self.phases = [held for held in self.phases if (held.peer, held.message.request) != before]
        self._check_room(message.token)
        self.phases.append(HeldPhase(peer, message, time.monotonic() + HOLD_SHARE * message.deadline_s))

    def _check_room(self, token: Token) -> None:
        """Numbers that nobody has confirmed may be anybody's: only so many of them wait."""
        if not self.proven(token) and self.unproven >= MOST_UNPROVEN:
            raise never_granted(token)

    def take_overdue(self, now: float) -> list[Held]:
        """Those whose deadline has passed; they wait no longer."""
        overdue = [held for held in self.waiting if held.until <= now]
        self._forget(overdue)
        return overdue

    def _forget(self, leaving: list[Held]) -> None:
        if not leaving:
            return
        self.held = {key: held for key, held in self.held.items() if held not in leaving}
        self.phases = [held for held in self.phases if held not in leaving]

    def reason(self, batch_size: int = 1) -> str:
        """Who waits for what, in words; empty when nobody has to wait."""
        return self.buffer.limiter.reason(batch_size) if self.rounds is None else self.rounds.reason()

    # --- batches ------------------------------------------------------------------------------------------

    def next_sample(self) -> HeldSample | None:
        """The request that waits longest, if it may be served now."""
        for sample in self.held.values():
            if self.proven(sample.message.token):
                return sample if self._may_serve(sample) else None
        return None

    def _may_serve(self, sample: HeldSample) -> bool:
        if sample.key in self.served:
            return True
        if self.rounds is not None:
            return self.rounds.can_draw(sample.message.draw)
        return self.buffer.limiter.can_sample(sample.message.batch_size)

    def draw(self, sample: HeldSample) -> tuple[Packed, Batch]:
        """Its batch, and what to say with it; it waits no longer, whatever comes of it."""
        del self.held[sample.key]
        message = sample.message
        self.buffer.check_token(message.token.number)  # a newer learner may have come while it was held
        tray, no_tray = self._tray_of(message)
        draw, batch_size, beta = message.draw, message.batch_size, message.beta
        if self.rounds is not None:
            arrays = self.rounds.draw(draw, batch_size, beta)
        else:
            counts = sample.key not in self.served  # a repeat does not count again
            arrays = self.buffer.draw(draw, batch_size, beta, count=counts, tray=tray)
        self._remember(sample.key)
        on_tray = arrays.layout.text if arrays.block is tray else ""
        return arrays, Batch(
            request=message.request, token=message.token, draw=draw, on_tray=on_tray, no_tray=no_tray
        )

    def _remember(self, key: DrawKey) -> None:
        self.served[key] = None
        if len(self.served) > REMEMBERED_DRAWS:
            self.served.popitem(last=False)

    def _tray_of(self, message: SampleRequest) -> tuple[Block | None, str]:
        """The learner's memory for this batch, or why there is none, where it lent some."""
        if message.tray is None or self.rounds is not None:
            return None, ""
        try:
            return self.trays.open(message.tray), ""
        except NoTray as error:
            return None, str(error)

    def take_update(self, received: Received, message: PriorityUpdate) -> None:
        """New priorities; in rounds they wait for their turn."""
        update = update_in(received)
        if self.rounds is not None:
            self.rounds.take_update(message.draw, *update)
        elif len(update[0]):
            self.buffer.update_priorities(*update)

    # --- the limiter --------------------------------------------------------------------------------------

    def adjust_limiter(self, values: Mapping[str, float], config: Config) -> None:
        """Settings that `check_limiter_values` let pass."""
        ratio = values.get("samples_per_insert")
        self.buffer.adjust_limiter(
            samples_per_insert=ratio,
            tolerance_samples=None if ratio is None else tolerance_samples(config, self.buffer.agent, ratio),
            min_steps=int(values["min_steps"]) if "min_steps" in values else None,
        )

    def note_blocked(self, now: float) -> None:
        """Keeps the moment since which somebody waits."""
        waits = any(self.proven(held.message.token) for held in self.held.values())
        blocked = "inserts" if self.withheld else "samples" if waits else ""
        if blocked != self.blocked:
            self.blocked, self.blocked_since = blocked, now

    # --- figures ------------------------------------------------------------------------------------------

    def stats(self, now: float) -> BufferStats:
        """Everything about this agent, its limiter included."""
        self.note_blocked(now)
        limiter = self.buffer.limiter
        batch_size = next((held.message.batch_size for held in self.held.values()), 1)
        figures = LimiterStats(
            blocked=self.blocked,
            reason=self.reason(batch_size) if self.blocked else "",
            since_s=now - self.blocked_since if self.blocked else 0.0,
            samples_per_insert=limiter.samples_per_insert,
            min_steps=limiter.min_steps,
            tolerance_samples=limiter.tolerance_samples,
            ahead_samples=limiter.ahead,
        )
        return BufferStats(held_requests=len(self.held), limiter=figures, **self.buffer.stats())

    def metrics(self) -> dict[str, float]:
        """The same in short, for heartbeats."""
        figures = {
            "fill": self.buffer.drawable_steps / self.buffer.capacity_steps,
            "steps": float(self.buffer.drawable_steps),
            "held": float(len(self.held)),
            "withheld": float(len(self.withheld)),
        }
        if self.rounds is not None:
            figures["rounds"] = float(self.rounds.rounds)
        return figures


def never_granted(token: Token) -> Refused:
    """For whoever comes under a number that cannot be true, or not yet."""
    return Refused("unknown_token", f"token {token.number} of {token.agent!r} was never granted")


def not_the_holder(agent: str) -> Refused:
    """For whoever comes under somebody else's lease."""
    return Refused("wrong_agent", f"the lease of {agent!r} is held by another learner than you")


def update_in(received: Received, welcome: bool = True) -> list[Array]:
    """Index, generation and priority of an update, or of one that rides on a request for a batch."""
    arrays = received.arrays
    if not welcome or (arrays and set(arrays) != {"index", "generation", "priority"}):
        raise BadMessage(f"a {received.message.kind} with arrays {sorted(arrays)}")  # type: ignore[attr-defined]
    update = [arrays.get(name, _NO_ROWS[name]) for name in ("index", "generation", "priority")]
    check_update(*update)
    return update
