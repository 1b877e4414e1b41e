"""The buffer through any order of events and deaths, against a model in plain Python; and a real kill -9."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from replay_episodes import DeathError, Episode, Sender, assert_row, die_before, make_buffer, make_spec

from services.replay.slot_kernels import STAGES

SPEC = make_spec(stack=3)
SLOTS, SEGMENT_STEPS, N_STEP = 4, 4, 2
RATIOS, MIN_STEPS, TOLERANCES = (0.25, 1.0, 2.5, 8.0), (1, 4, 9, 20), (0.0, 4.0, 30.5, 200.0)
BATCHES = (1, 6, 40, 500)
DEATHS = (*STAGES, "advance")


@dataclass
class Stored:
    """What the model knows of a slot."""

    insertion: int
    episode: Episode
    first_step: int
    priorities: list[float]


@dataclass
class Account:
    """The limiter's balance as a plain account: steps pay in, draws take out, and nothing is worked out from
    totals. All settings are sums of powers of two, so that both sides are exact."""

    samples_per_insert: float
    min_steps: int
    tolerance: float
    config: tuple[float, int] = field(init=False)
    balance: float = field(init=False)
    inserted: int = 0
    sampled: int = 0
    drawable: int = 0
    full: bool = False

    def __post_init__(self) -> None:
        self.config = self.samples_per_insert, self.min_steps
        self.start_anew()

    def start_anew(self) -> None:
        """The steps that are still missing pay a debt off, which is 0 once min_steps are in."""
        self.balance = 0.0
        for _ in range(self.inserted, self.min_steps):
            self.balance -= self.samples_per_insert

    def store(self, steps: int) -> None:
        for _ in range(steps):
            self.inserted += 1
            self.balance += self.samples_per_insert

    def sample(self, size: int) -> None:
        self.sampled += size
        self.balance -= size

    def forgive(self) -> None:
        self.balance = min(self.balance, self.tolerance)

    def adjust(self, samples_per_insert: float | None, min_steps: int | None) -> None:
        if samples_per_insert is not None:
            self.samples_per_insert = samples_per_insert
        if min_steps is not None:
            self.min_steps = min_steps
        if samples_per_insert is not None or min_steps is not None:
            self.start_anew()

    def reopen(self, samples_per_insert: float, min_steps: int, tolerance: float) -> None:
        """What was set stays while the config says the same; the tolerance is always the config's."""
        self.tolerance = tolerance
        config = samples_per_insert, min_steps
        if config not in (self.config, (self.samples_per_insert, self.min_steps)):
            self.adjust(samples_per_insert, min_steps)
        self.config = config

    @property
    def starved(self) -> bool:
        return self.drawable == 0 or (self.drawable < self.min_steps and not self.full)

    @property
    def holds_actors(self) -> bool:
        return not self.starved and self.balance > self.tolerance

    def holds_learner(self, batch: int) -> bool:
        overdrawn = self.balance - batch < -self.tolerance
        return self.starved or (overdrawn and not self.holds_actors)

    def reason(self, batch: int) -> str:
        """How the limiter's own words begin, without the numbers."""
        if self.starved:
            return "more steps wanted"
        if self.holds_actors:
            return "actors are"
        return "the learner is" if self.holds_learner(batch) else ""


@dataclass
class Drawn:
    """A draw that must come out the same as long as nothing was stored or updated."""

    number: int
    size: int
    beta: float
    arrays: dict[str, np.ndarray]


class BufferMachine(RuleBasedStateMachine):
    """Two streams into a ring of four slots, with a limiter whose settings change."""

    drawn = Bundle("drawn")

    @initialize(
        ratio=st.sampled_from(RATIOS),
        min_steps=st.sampled_from(MIN_STEPS),
        tolerance=st.sampled_from(TOLERANCES),
        lengths=st.lists(st.sampled_from([1, 1, 4, 7]), max_size=6),
    )
    def open(self, ratio: float, min_steps: int, tolerance: float, lengths: list[int]) -> None:
        self.config = {
            "samples_per_insert": ratio,
            "min_steps": min_steps,
            "tolerance_samples": tolerance,
        }
        self.account = Account(ratio, min_steps, tolerance)
        self.last: Drawn | None = None
        self.directory = Path(tempfile.mkdtemp())
        self.senders = [Sender(SPEC, number=n) for n in (0, 1)]
        self.waiting: list[list[tuple]] = [[], []]
        self.sent: list[list[tuple]] = [[], []]
        self.slots: list[Stored | None] = [None] * SLOTS
        self.victim = self.insertions = self.episodes = self.draws = 0
        self.stale = self.duplicates = self.gaps = 0
        self.max_priority = 1.0
        self.reopen()
        for length in lengths:
            self.play(0, length, "terminated")
            self.insert_next(0, 2)

    @rule()
    def reopen(self) -> None:
        self.buffer = make_buffer(
            self.directory,
            SPEC,
            capacity_steps=SLOTS * SEGMENT_STEPS,
            segment_steps=SEGMENT_STEPS,
            n_step=N_STEP,
            **self.config,
        )
        self.account.reopen(*self.config.values())
        self.account.full = all(self.slots)
        self.note_drawable()

    @rule(
        ratio=st.none() | st.sampled_from(RATIOS),
        min_steps=st.none() | st.sampled_from(MIN_STEPS),
        tolerance=st.none() | st.sampled_from(TOLERANCES),
    )
    def reopen_with_another_config(
        self, ratio: float | None, min_steps: int | None, tolerance: float | None
    ) -> None:
        changes = {"samples_per_insert": ratio, "min_steps": min_steps, "tolerance_samples": tolerance}
        self.config |= {name: value for name, value in changes.items() if value is not None}
        self.reopen()

    @rule()
    def reopen_with_what_was_set_in_the_config(self) -> None:
        self.config["samples_per_insert"] = self.account.samples_per_insert
        self.config["min_steps"] = self.account.min_steps
        self.reopen()

    @rule(
        ratio=st.none() | st.sampled_from(RATIOS),
        min_steps=st.none() | st.sampled_from(MIN_STEPS),
        tolerance=st.none() | st.sampled_from(TOLERANCES),
    )
    def adjust_limiter(self, ratio: float | None, min_steps: int | None, tolerance: float | None) -> None:
        self.buffer.adjust_limiter(samples_per_insert=ratio, min_steps=min_steps, tolerance_samples=tolerance)
        self.account.adjust(ratio, min_steps)
        if tolerance is not None:
            self.account.tolerance = tolerance

    @rule()
    def forgive(self) -> None:
        self.buffer.forgive()
        self.account.forgive()

    @rule(
        stream=st.integers(0, 1),
        length=st.integers(1, 10),
        end=st.sampled_from(["terminated", "truncated", ""]),
    )
    def play(self, stream: int, length: int, end: str) -> None:
        self.episodes += 1
        episode = Episode(SPEC, 1000 * self.episodes, length, end)
        for n, (lengths, arrays) in enumerate(episode.cut(SEGMENT_STEPS, N_STEP)):
            segment = self.senders[stream].next(lengths, arrays)
            self.waiting[stream].append((segment, arrays, episode, n * SEGMENT_STEPS))

    @precondition(lambda self: any(self.waiting))
    @rule(stream=st.integers(0, 1), most=st.integers(1, 4))
    def insert_next(self, stream: int, most: int) -> None:
        stream = stream if self.waiting[stream] else 1 - stream
        for piece in self.waiting[stream][:most]:
            self.sent[stream].append(self.waiting[stream].pop(0))
            assert self.buffer.insert(piece[0], piece[1], now=0.0) == "stored"
            self.note_stored(piece)

    @precondition(lambda self: any(self.sent))
    @rule(stream=st.integers(0, 1), which=st.integers(0, 100))
    def insert_again(self, stream: int, which: int) -> None:
        if self.sent[stream]:
            segment, arrays, *_ = self.sent[stream][which % len(self.sent[stream])]
            assert self.buffer.insert(segment, arrays, now=0.0) == "duplicate"
            self.duplicates += segment.owned

    @precondition(lambda self: any(len(waiting) > 1 for waiting in self.waiting))
    @rule(stream=st.integers(0, 1), which=st.integers(0, 100))
    def insert_too_early(self, stream: int, which: int) -> None:
        later = self.waiting[stream][1:]
        if later:
            segment, arrays, *_ = later[which % len(later)]
            assert self.buffer.insert(segment, arrays, now=0.0) == "gap"
            self.gaps += segment.owned

    @precondition(lambda self: any(self.waiting))
    @rule(stream=st.integers(0, 1), stage=st.sampled_from(DEATHS))
    def die_in_insert(self, stream: int, stage: str) -> None:
        stream = stream if self.waiting[stream] else 1 - stream
        piece = self.waiting[stream][0]

        def die(*_: object) -> None:
            raise DeathError

        if stage == "advance":
            self.buffer._streams.advance = die
        else:
            die_before(self.buffer._ring, stage)
        try:
            self.buffer.insert(piece[0], piece[1], now=0.0)
        except DeathError:
            pass
        else:
            raise AssertionError("survived")
        if stage == "advance":
            self.sent[stream].append(self.waiting[stream].pop(0))
            self.note_stored(piece)
        elif stage != "invalidate":
            self.slots[self.victim] = None
            self.last = None
        self.reopen()

    def note_stored(self, piece: tuple) -> None:
        segment, _, episode, first = piece
        self.insertions += 1
        self.account.store(segment.owned)
        self.last = None
        self.slots[self.victim] = Stored(self.insertions, episode, first, [self.max_priority] * segment.owned)
        self.account.full = all(self.slots)
        self.victim = (self.victim + 1) % SLOTS
        self.note_drawable()

    def note_drawable(self) -> None:
        self.account.drawable = sum(len(stored.priorities) for stored in self.slots if stored is not None)

    @precondition(lambda self: any(self.slots))
    @rule(target=drawn, size=st.integers(1, 12), beta=st.sampled_from([0.0, 0.4, 1.0]))
    def draw(self, size: int, beta: float):
        batch = self.buffer.draw(self.draws, size, beta)
        self.last = Drawn(self.draws, size, beta, {name: array.copy() for name, array in batch.items()})
        self.draws += 1
        self.account.sample(size)
        entries = []
        for i, index in enumerate(batch["index"].tolist()):
            slot, step = divmod(index, SEGMENT_STEPS)
            stored = self.slots[slot]
            assert stored is not None
            assert batch["version"][i] == stored.episode.first + stored.first_step + step
            assert_row(batch, i, stored.episode.expected(stored.first_step + step, N_STEP))
            entries.append((index, int(batch["generation"][i]), stored.insertion))
        return multiple(*entries)

    @precondition(lambda self: self.last is not None)
    @rule(times=st.integers(1, 3), count=st.booleans())
    def draw_last_again(self, times: int, count: bool) -> None:
        assert self.last is not None
        for _ in range(times):
            again = self.buffer.draw(self.last.number, self.last.size, self.last.beta, count=count)
            assert list(again) == list(self.last.arrays)
            for name, array in self.last.arrays.items():
                assert array.tobytes() == again[name].tobytes(), name
            if count:
                self.account.sample(self.last.size)

    @rule(
        entries=st.lists(drawn, max_size=8),
        values=st.lists(st.floats(0, 100, width=32), min_size=8, max_size=8),
    )
    def update(self, entries: list[tuple[int, int, int]], values: list[float]) -> None:
        stale = 0
        for (index, _, insertion), value in zip(entries, values, strict=False):
            stored = self.slots[index // SEGMENT_STEPS]
            if stored is None or stored.insertion != insertion:
                stale += 1
                continue
            stored.priorities[index % SEGMENT_STEPS] = value
            self.max_priority = max(self.max_priority, value)
            self.last = None
        found = self.buffer.update_priorities(
            np.array([entry[0] for entry in entries], np.int64),
            np.array([entry[1] for entry in entries], np.uint64),
            np.array(values[: len(entries)], np.float32),
        )
        assert found == stale
        self.stale += stale

    @invariant()
    def agrees_with_model(self) -> None:
        leaves = np.zeros((SLOTS, SEGMENT_STEPS))
        for slot, stored in enumerate(self.slots):
            if stored is not None:
                owned = len(stored.priorities)
                leaves[slot, :owned] = (np.array(stored.priorities) + 1e-3) ** 0.6
        tree = self.buffer._tree.get(np.arange(SLOTS * SEGMENT_STEPS))
        np.testing.assert_allclose(tree, leaves.ravel(), rtol=1e-6)
        assert self.buffer.drawable_steps == (leaves > 0).sum()
        assert self.buffer.max_priority == self.max_priority

    @invariant()
    def paces_like_the_account(self) -> None:
        account, limiter = self.account, self.buffer.limiter
        assert (self.buffer.inserted_steps, self.buffer.sampled_steps) == (account.inserted, account.sampled)
        assert (limiter.drawable_steps, limiter.full) == (account.drawable, account.full)
        assert limiter.samples_per_insert == account.samples_per_insert
        assert limiter.min_steps == account.min_steps
        assert limiter.tolerance_samples == account.tolerance
        assert limiter.ahead == pytest.approx(account.balance, abs=1e-9)
        assert limiter.inserts_ahead() == account.holds_actors
        edge = max(0, int(account.balance + account.tolerance))  # the largest batch that may be drawn
        for batch in (*BATCHES, edge, edge + 1):
            assert limiter.can_sample(batch) == (not account.holds_learner(batch))
            assert limiter.can_sample(batch) or not limiter.inserts_ahead()
            reason, words = limiter.reason(batch), account.reason(batch)
            assert bool(reason) == (account.holds_actors or account.holds_learner(batch))
            assert words in reason

    @invariant()
    def keeps_its_books(self) -> None:
        books = self.buffer.ledger(now=0.0, lease_s=5.0)
        assert books["stored"] == self.account.inserted
        assert books["produced"] == books["stored"] + books["in_flight"]
        assert (books["stored_twice"], books["lost"], books["abandoned"]) == (0, 0, 0)
        assert books["duplicates_dropped"] == self.duplicates
        assert self.buffer.counters()["gaps_dropped"] == self.gaps
        assert self.buffer.stats()["stale_priorities"] == self.stale
        for sender, sent in zip(self.senders, self.sent, strict=True):
            assert self.buffer.mark(sender.incarnation) == len(sent)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=90, stateful_step_count=40, deadline=None)

INSERTER = """
import sys
sys.path.append(sys.argv[2])
from test_buffer_crashes import insert_forever
insert_forever(sys.argv[1])
"""
KILL_SLOTS = 300


def open_for_kills(directory: Path):
    return make_buffer(
        directory, SPEC, capacity_steps=KILL_SLOTS * SEGMENT_STEPS, segment_steps=SEGMENT_STEPS
    )


def segment_number(sequence: int) -> tuple:
    length = 1 + sequence % SEGMENT_STEPS
    ((lengths, arrays),) = Episode(SPEC, 10 * sequence, length, "terminated").cut(SEGMENT_STEPS, N_STEP)
    produced = sum(1 + n % SEGMENT_STEPS for n in range(1, sequence + 1))
    return Sender(SPEC, produced=produced).segment(sequence, lengths, arrays), arrays


def insert_forever(directory: str) -> None:
    """Runs in a process of its own: sends the last three again, then goes on, reporting each commit."""
    buffer = open_for_kills(Path(directory))
    mark = buffer.mark(Sender(SPEC).incarnation)
    for sequence in range(max(1, mark - 2), 2**31):
        segment, arrays = segment_number(sequence)
        verdict = buffer.insert(segment, arrays)
        assert verdict == ("stored" if sequence > mark else "duplicate")
        os.write(1, f"{sequence}\n".encode())
        batch = buffer.draw(sequence, 4, 0.4)
        buffer.update_priorities(batch["index"], batch["generation"], batch["return"] ** 2)


def kill_somewhere(directory: Path, inserts: int) -> int:
    """Starts an inserter, kills it once it has reported so many commits; the last commit it reported."""
    command = [sys.executable, "-c", INSERTER, str(directory), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(inserts):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split(b"\n")
        process.wait()
    assert process.returncode == -signal.SIGKILL
    return int(rest[-2]) if len(rest) > 1 else 0


def test_kill_nine_at_random_moments_keeps_every_commit_once(tmp_path: Path) -> None:
    """Ten times killed, the ring holds every commit that was reported, whole, in order and once."""
    chance = random.Random(5)
    for _ in range(10):
        reported = kill_somewhere(tmp_path, chance.randrange(1, 150))
        buffer = open_for_kills(tmp_path)
        ring, mark = buffer._ring, buffer.mark(Sender(SPEC).incarnation)
        valid = ring.valid_slots()
        found = sorted(ring.metadata["sequence"][valid].tolist())
        assert mark >= reported
        assert found == list(range(mark - len(found) + 1, mark + 1))
        assert len(found) >= min(mark, KILL_SLOTS - 1)
        assert ring.state["damaged_slots"] == 0
        for slot in valid.tolist():
            segment, arrays = segment_number(int(ring.metadata["sequence"][slot]))
            assert ring.metadata["checksum"][slot] == segment.checksum
            assert all(np.array_equal(kept, arrays[name]) for name, kept in ring.slot_arrays(slot).items())
        books = buffer.ledger(now=0.0, lease_s=5.0)
        stored = sum(1 + n % SEGMENT_STEPS for n in range(1, mark + 1))
        assert (books["stored"], books["produced"]) == (stored, stored)
        assert (books["stored_twice"], books["lost"]) == (0, 0)
    assert mark > KILL_SLOTS
