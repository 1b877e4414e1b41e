"""Snapshots: exactly the state at their beginning, whatever goes on meanwhile; proven, and brought back."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_episodes import AGENT, Episode, Sender, fill, make_buffer, make_spec
from structlog.testing import capture_logs

from services.replay import snapshot, snapshot_files
from services.replay.buffer import AgentBuffer
from services.replay.snapshot import Snapshot
from services.replay.snapshot_files import DamagedSnapshotError
from shared.errors import ConfigError, Refused

SPEC = make_spec(stack=2)
SLOTS = 16  # 64 steps in segments of 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk a turn, and each of a few slots: a snapshot of a small buffer takes many turns."""
    monkeypatch.setattr(snapshot, "SLICE_S", 0.0)
    monkeypatch.setattr(snapshot, "CHUNK_SLOTS", 3)
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1_000)


class Life:
    """What goes on around a buffer, by the numbers."""

    def __init__(self, replay: Path, **changes: Any) -> None:
        self.replay = replay
        self.buffer = make_buffer(replay / AGENT, SPEC, **changes)
        self.senders = [Sender(SPEC, number=n) for n in (1, 2)]
        self.draws = self.episodes = 0
        self.drawn: list[tuple[np.ndarray, np.ndarray]] = []

    def act(self, kind: int, number: int) -> None:
        [self.insert, self.draw, self.update, self.report, self.other][kind % 5](number)

    def insert(self, number: int) -> None:
        self.episodes += 1
        end = ("terminated", "truncated", "")[number % 3]
        fill(
            self.buffer,
            self.senders[number % 2],
            [Episode(SPEC, 1000 * self.episodes, 1 + number % 11, end)],
        )

    def draw(self, number: int) -> None:
        if self.buffer.drawable_steps:
            batch = self.buffer.draw(self.draws, 1 + number % 16, 0.5)
            self.draws += 1
            self.drawn.append((batch["index"], batch["generation"]))

    def update(self, number: int) -> None:
        if self.drawn:
            index, generation = self.drawn[number % len(self.drawn)]
            priority = np.random.default_rng(number).random(len(index)) * 10
            self.buffer.update_priorities(index, generation, priority)

    def report(self, number: int) -> None:
        sender = self.senders[number % 2]
        self.buffer.report(sender.incarnation, sender.produced + number % 3, number % 7 == 0, 0.0)

    def other(self, number: int) -> None:
        self.buffer.note_token(number)
        self.buffer.adjust_limiter(samples_per_insert=1.0 + number % 5)

    def begin(self, number: int = 1) -> Snapshot:
        return Snapshot(self.replay, 0, number, {AGENT: self.buffer})


def contents(directory: Path) -> dict[str, Any]:
    """Everything that a buffer's files say, apart from rows of slots that are not valid."""
    buffer = make_buffer(directory, SPEC)
    ring = buffer.ring
    valid = ring.valid_slots()
    state = {name: ring.state[name] for name in ring.state._fields if name != "openings"}
    return {
        "valid": valid.tolist(),
        "commit": ring.commit.tolist(),
        "metadata": ring.metadata.tobytes(),
        "priorities": ring.priority_records.tobytes(),
        "rows": [
            {name: array.tolist() for name, array in ring.slot_arrays(slot).items()}
            for slot in valid.tolist()
        ],
        "next_slot": ring.next_slot,
        "streams": buffer.stream_bytes(),
        "state": state,
        "ledger": buffer.ledger(0.0, 5.0),
        "limiter": vars(buffer.limiter),
        "leaves": buffer._tree.get(np.arange(buffer.capacity_steps)).tolist(),
    }


def restored(replay: Path, number: int, target: Path) -> Path:
    snapshot_files.restore(replay / "snapshots" / str(number) / AGENT, target)
    return target


EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(before=EVENTS, meanwhile=EVENTS)
def test_snapshot_taken_amid_anything_equals_state_at_its_beginning(
    before: list[tuple[int, int]], meanwhile: list[tuple[int, int]]
) -> None:
    """Rows, metadata, commits, priorities, marks, counters and limiter are those of the first moment."""
    directory = Path(tempfile.mkdtemp())
    try:
        life = Life(directory)
        for event in before:
            life.act(*event)
        taken = life.begin()
        shutil.copytree(directory / AGENT, directory / "reference")
        for event in meanwhile:
            life.act(*event)
            taken.advance()
        taken.finish(10.0)
        assert contents(restored(directory, 1, directory / "back")) == contents(directory / "reference")
    finally:
        shutil.rmtree(directory)


def test_snapshot_of_a_ring_overwritten_meanwhile_keeps_the_old_rows(tmp_path: Path) -> None:
    """Every slot is overwritten while it is taken, and all old ones are in it."""
    life = Life(tmp_path)
    for number in range(30):
        life.insert(3 * number)
    for number in range(4):
        life.draw(number)
    taken = life.begin()
    shutil.copytree(tmp_path / AGENT, tmp_path / "reference")
    commits = life.buffer.ring.commit.copy()
    for number in range(30):
        life.insert(3 * number + 1)
        life.update(number)
    assert (life.buffer.ring.commit != commits).all()
    assert life.buffer.ring.watcher is not None
    taken.finish(10.0)
    assert life.buffer.ring.watcher is None
    assert contents(restored(tmp_path, 1, tmp_path / "back")) == contents(tmp_path / "reference")


def test_snapshot_of_an_empty_buffer_restores_empty(tmp_path: Path) -> None:
    """Nothing is a state too."""
    Life(tmp_path).begin().finish(10.0)
    assert make_buffer(restored(tmp_path, 1, tmp_path / "back"), SPEC).drawable_steps == 0


def test_restored_buffer_continues_where_it_was(tmp_path: Path) -> None:
    """The next segment of a stream is the one after the mark, the same draws give the same batches."""
    life = Life(tmp_path)
    for number in range(12):
        life.act(number % 3, number)
    life.begin().finish(10.0)
    back = make_buffer(restored(tmp_path, 1, tmp_path / "back"), SPEC)
    for sender in life.senders:
        assert back.mark(sender.incarnation) == life.buffer.mark(sender.incarnation) == sender.sequence
    for name, array in life.buffer.draw(99, 16, 0.5).items():
        np.testing.assert_array_equal(back.draw(99, 16, 0.5, count=False)[name], array)
    fill(back, life.senders[0], [Episode(SPEC, 90_000, 9, "terminated")])
    assert back.ledger(0.0, 5.0)["lost"] == back.ledger(0.0, 5.0)["stored_twice"] == 0


def test_restore_after_later_openings_never_repeats_a_generation(tmp_path: Path) -> None:
    """A priority for a step from after the snapshot finds none, even in the same slot; tokens do not fall."""
    life = Life(tmp_path)
    life.insert(3)
    life.begin().finish(10.0)
    for _ in range(3):  # openings that the snapshot knows nothing of
        life.buffer = make_buffer(tmp_path / AGENT, SPEC)
    life.buffer.note_token(9)
    life.insert(10)
    late = life.buffer.draw(0, 32, 0.5)
    manifests = snapshot_files.prove_all(tmp_path / "snapshots", 1, [AGENT])
    aside = snapshot_files.restore_run(tmp_path, 1, manifests)
    assert aside == tmp_path / "before-restore-1"
    assert make_buffer(aside / AGENT, SPEC).drawable_steps == life.buffer.drawable_steps
    back = make_buffer(tmp_path / AGENT, SPEC)
    assert back.ring.state["token"] == 9
    sender = Sender(SPEC, number=7)
    fill(back, sender, [Episode(SPEC, 70_000, 11, "terminated")])
    old = set(make_buffer(restored(tmp_path, 1, tmp_path / "copy"), SPEC).ring.commit.tolist())
    newer = ~np.isin(late["generation"], list(old))
    assert newer.any()
    priority = np.ones(int(newer.sum()))
    assert back.update_priorities(late["index"][newer], late["generation"][newer], priority) == newer.sum()


def test_restore_twice_keeps_every_buffer_that_was_there(tmp_path: Path) -> None:
    """Each restore moves aside what it replaces, under a name of its own."""
    life = Life(tmp_path)
    life.insert(3)
    life.begin().finish(10.0)
    manifests = snapshot_files.prove_all(tmp_path / "snapshots", 1, [AGENT])
    found = [snapshot_files.restore_run(tmp_path, 1, manifests) for _ in range(2)]
    assert [path and path.name for path in found] == ["before-restore-1", "before-restore-2"]
    assert all(path and (path / AGENT / "rows").exists() for path in found)


def test_restore_into_a_used_directory_is_refused(tmp_path: Path) -> None:
    """Files that are there are never written over."""
    life = Life(tmp_path)
    life.begin().finish(10.0)
    with pytest.raises(ConfigError, match="not empty"):
        restored(tmp_path, 1, tmp_path / AGENT)


# --- damage -----------------------------------------------------------------------------------------------


def two_snapshots(replay: Path) -> Life:
    life = Life(replay)
    for number in (1, 2):
        life.insert(number)
        life.begin(number).finish(10.0)
    return life


@settings(max_examples=40, deadline=None)
@given(which=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans(), data=st.data())
def test_snapshot_damaged_anywhere_gives_way_to_the_one_before(
    which: int, bit: int, cut: bool, data: st.DataObject
) -> None:
    """A flipped bit or a missing end of any file is noticed, said, and the previous snapshot is taken."""
    directory = Path(tempfile.mkdtemp())
    try:
        two_snapshots(directory)
        root = directory / "snapshots"
        files = sorted(path for path in (root / "2" / AGENT).iterdir() if path.stat().st_size)
        victim = files[which % len(files)]
        contents = bytearray(victim.read_bytes())
        place = data.draw(st.integers(0, len(contents) - 1))
        if cut:
            del contents[place:]
        else:
            contents[place] ^= 1 << bit
        victim.write_bytes(contents)
        with capture_logs() as logs:
            number, manifests = snapshot_files.newest_whole(root, [AGENT])
        assert (number, list(manifests)) == (1, [AGENT])
        (line,) = logs
        assert line["number"] == 2
        assert victim.name in line["reason"]
    finally:
        shutil.rmtree(directory)


def test_snapshot_without_one_agent_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """A process that was killed between two agents' places leaves a number that is not used."""
    two_snapshots(tmp_path)
    shutil.rmtree(tmp_path / "snapshots" / "2" / AGENT)
    assert snapshot_files.newest_whole(tmp_path / "snapshots", [AGENT])[0] == 1


def test_snapshots_all_damaged_are_refused_with_every_reason(tmp_path: Path) -> None:
    """Nothing is restored from what cannot be trusted."""
    two_snapshots(tmp_path)
    for number in (1, 2):
        (tmp_path / "snapshots" / str(number) / AGENT / "commit").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"all are damaged: 2 .*0 bytes.*1 .*0 bytes"):
        snapshot_files.newest_whole(tmp_path / "snapshots", [AGENT])
    with pytest.raises(ConfigError, match="none was taken"):
        snapshot_files.newest_whole(tmp_path / "nothing", [AGENT])


def test_manifest_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version's snapshot is not read as if it were this one's."""
    two_snapshots(tmp_path)
    monkeypatch.setattr(snapshot_files, "FORMAT", 2)
    with pytest.raises(DamagedSnapshotError, match="format 1"):
        snapshot_files.prove(tmp_path / "snapshots" / "2" / AGENT)


# --- keeping and failing ----------------------------------------------------------------------------------


def test_snapshots_beyond_two_are_removed_oldest_first(tmp_path: Path) -> None:
    """The newest two stay, and what other services keep under a number stays too."""
    life = Life(tmp_path)
    for number in (1, 2, 3):
        life.begin(number).finish(10.0)
    assert snapshot_files.numbers(tmp_path / "snapshots") == [3, 2]
    (tmp_path / "snapshots" / "2" / "of_another_service").mkdir()
    life.begin(4).finish(10.0)
    assert snapshot_files.numbers(tmp_path / "snapshots") == [4, 3, 2]
    assert not (tmp_path / "snapshots" / "2" / AGENT).exists()


def test_snapshot_abandoned_leaves_nothing(tmp_path: Path) -> None:
    """Neither a name nor a draft nor a watcher remains."""
    life = Life(tmp_path)
    life.insert(10)
    taken = life.begin()
    taken.advance()
    taken.abandon()
    taken._writer.shutdown(wait=True)
    assert life.buffer.ring.watcher is None
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_snapshot_on_a_disk_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's words reach whoever ordered it; the buffer works on."""

    def fail(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    life = Life(tmp_path)
    life.insert(10)
    monkeypatch.setattr(snapshot.os, "pwrite", fail)
    taken = life.begin()
    with pytest.raises(Refused, match="No space left on device"):
        taken.finish(10.0)
    taken.abandon()
    life.insert(10)


def test_snapshot_on_a_disk_too_slow_for_the_inserts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that nobody writes do not fill the memory."""
    monkeypatch.setattr(snapshot, "MOST_WAITING_BYTES", 100)
    monkeypatch.setattr(snapshot.os, "pwrite", lambda *_arguments: time.sleep(0.2) or 10**6)
    life = Life(tmp_path)
    life.insert(10)
    taken = life.begin()
    with pytest.raises(Refused, match="too slow"):
        taken.finish(10.0)
    taken.abandon()


def test_drafts_of_a_killed_service_are_removed_by_it_alone(tmp_path: Path) -> None:
    """Another service's draft may be being written."""
    for service in (0, 1):
        snapshot_files.draft_path(tmp_path, 3, service, attempt=2).mkdir()
    snapshot_files.remove_drafts(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["3.2.service-1.draft"]


# --- the limiter's settings -------------------------------------------------------------------------------


def settings_of(buffer: AgentBuffer) -> tuple[float, int]:
    return buffer.limiter.samples_per_insert, buffer.limiter.min_steps


def test_limiter_changed_while_running_stays_after_a_restart(tmp_path: Path) -> None:
    """What a person set is not undone by a replay that comes back, nor is its balance."""
    life = Life(tmp_path)
    life.insert(10)
    life.buffer.adjust_limiter(samples_per_insert=2.5, min_steps=7)
    life.insert(10)
    for _ in range(2):
        back = make_buffer(tmp_path / AGENT, SPEC)
        assert settings_of(back) == (2.5, 7)
        assert back.limiter.ahead == life.buffer.limiter.ahead


def test_limiter_changed_while_running_gives_way_to_a_new_config(tmp_path: Path) -> None:
    """The config wins when it says something new, and only then."""
    life = Life(tmp_path)
    life.buffer.adjust_limiter(samples_per_insert=2.5)
    changed = make_buffer(tmp_path / AGENT, SPEC, samples_per_insert=3.0)
    assert settings_of(changed) == (3.0, 4)
    assert settings_of(make_buffer(tmp_path / AGENT, SPEC, samples_per_insert=3.0)) == (3.0, 4)


def test_limiter_of_a_state_file_from_before_is_the_config_s(tmp_path: Path) -> None:
    """A shorter state file is extended, and its balance is kept."""
    life = Life(tmp_path)
    life.insert(10)
    path = tmp_path / AGENT / "state"
    path.write_bytes(path.read_bytes()[:-16])
    back = make_buffer(tmp_path / AGENT, SPEC)
    assert settings_of(back) == (8.0, 4)
    assert back.limiter.ahead == life.buffer.limiter.ahead
