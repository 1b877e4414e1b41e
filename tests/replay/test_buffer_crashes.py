"""The buffer through any order of events and deaths, against a model in plain Python; and a real kill -9."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from replay_episodes import Episode, Sender, assert_row, make_buffer, make_spec

SPEC = make_spec(stack=3)
SLOTS, SEGMENT_STEPS, N_STEP = 4, 4, 2
DEATHS = ("_invalidate", "_write_rows", "_write_metadata", "_write_priorities", "_commit", "advance")


class DeathError(Exception):
    """Stands for the end of the process."""


@dataclass
class Stored:
    """What the model knows of a slot."""

    insertion: int
    episode: Episode
    first_step: int
    priorities: list[float]


class BufferMachine(RuleBasedStateMachine):
    """Two streams into a ring of four slots."""

    drawn = Bundle("drawn")

    @initialize()
    def open(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.senders = [Sender(SPEC, number=n) for n in (0, 1)]
        self.waiting: list[list[tuple]] = [[], []]
        self.sent: list[list[tuple]] = [[], []]
        self.slots: list[Stored | None] = [None] * SLOTS
        self.victim = self.insertions = self.stored_steps = self.episodes = self.draws = self.sampled = 0
        self.stale = self.duplicates = self.gaps = 0
        self.max_priority = 1.0
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.buffer = make_buffer(
            self.directory,
            SPEC,
            capacity_steps=SLOTS * SEGMENT_STEPS,
            segment_steps=SEGMENT_STEPS,
            n_step=N_STEP,
        )

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

    @rule(stream=st.integers(0, 1))
    def insert_next(self, stream: int) -> None:
        if self.waiting[stream]:
            piece = self.waiting[stream].pop(0)
            self.sent[stream].append(piece)
            assert self.buffer.insert(piece[0], piece[1], now=0.0) == "stored"
            self.note_stored(piece)

    @rule(stream=st.integers(0, 1), which=st.integers(0, 100))
    def insert_again(self, stream: int, which: int) -> None:
        if self.sent[stream]:
            segment, arrays, *_ = self.sent[stream][which % len(self.sent[stream])]
            assert self.buffer.insert(segment, arrays, now=0.0) == "duplicate"
            self.duplicates += segment.owned

    @rule(stream=st.integers(0, 1), which=st.integers(0, 100))
    def insert_too_early(self, stream: int, which: int) -> None:
        later = self.waiting[stream][1:]
        if later:
            segment, arrays, *_ = later[which % len(later)]
            assert self.buffer.insert(segment, arrays, now=0.0) == "gap"
            self.gaps += segment.owned

    @rule(stream=st.integers(0, 1), stage=st.sampled_from(DEATHS))
    def die_in_insert(self, stream: int, stage: str) -> None:
        if not self.waiting[stream]:
            return
        piece = self.waiting[stream][0]

        def die(*_: object) -> None:
            raise DeathError

        setattr(self.buffer._streams if stage == "advance" else self.buffer._ring, stage, die)
        try:
            self.buffer.insert(piece[0], piece[1], now=0.0)
        except DeathError:
            pass
        else:
            raise AssertionError("survived")
        if stage == "advance":
            self.sent[stream].append(self.waiting[stream].pop(0))
            self.note_stored(piece)
        elif stage != "_invalidate":
            self.slots[self.victim] = None
        self.reopen()

    def note_stored(self, piece: tuple) -> None:
        segment, _, episode, first = piece
        self.insertions += 1
        self.stored_steps += segment.owned
        self.slots[self.victim] = Stored(self.insertions, episode, first, [self.max_priority] * segment.owned)
        self.victim = (self.victim + 1) % SLOTS

    @rule(target=drawn, size=st.integers(1, 12))
    def draw(self, size: int):
        if not any(self.slots):
            return multiple()
        batch = self.buffer.draw(self.draws, size, 0.4)
        self.draws += 1
        self.sampled += size
        entries = []
        for i, index in enumerate(batch["index"].tolist()):
            slot, step = divmod(index, SEGMENT_STEPS)
            stored = self.slots[slot]
            assert stored is not None
            assert batch["version"][i] == stored.episode.first + stored.first_step + step
            assert_row(batch, i, stored.episode.expected(stored.first_step + step, N_STEP))
            entries.append((index, int(batch["generation"][i]), stored.insertion))
        return multiple(*entries)

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
        assert (self.buffer.inserted_steps, self.buffer.sampled_steps) == (self.stored_steps, self.sampled)

    @invariant()
    def keeps_its_books(self) -> None:
        books = self.buffer.ledger(now=0.0, lease_s=5.0)
        assert books["stored"] == self.stored_steps
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
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

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
