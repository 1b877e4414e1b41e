"""The ring's files: the commit, what survives a death at each stage, and what is refused."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from replay_episodes import DeathError, Episode, Sender, die_before, make_spec

from services.replay.ring import Ring
from services.replay.slot_kernels import STAGES
from services.replay.sum_tree import SumTree
from shared.codec import pack_segment
from shared.errors import ConfigError

SPEC = make_spec(stack=2)


def open_ring(directory: Path, slots: int = 3) -> Ring:
    return Ring(directory, SPEC, slots=slots, segment_steps=4, n_step=3)


def put(ring: Ring, sender: Sender) -> dict[str, np.ndarray]:
    (lengths, arrays), *_ = Episode(SPEC, 100 * sender.sequence, 4, "terminated").cut(4, 3)
    packed = pack_segment(SPEC, arrays)
    segment, tree = sender.next(lengths, arrays), SumTree(ring.slots * ring.segment_steps)
    ring.insert(segment, packed, stored_after=sender.produced, priority=1.0, tree=tree, leaf=1.0)
    return arrays


def sequences(ring: Ring) -> list[int]:
    return sorted(ring.metadata["sequence"][ring.valid_slots()].tolist())


def test_insert_reopened_without_sync_has_same_rows(tmp_path: Path) -> None:
    """What was committed is there again, byte for byte, when the object is dropped and opened anew."""
    arrays = put(open_ring(tmp_path), Sender(SPEC))
    again = open_ring(tmp_path)
    assert again.valid_slots().tolist() == [0]
    for name, array in again.slot_arrays(0).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_insert_past_the_end_overwrites_the_oldest(tmp_path: Path) -> None:
    """The ring keeps the newest segments, also when it is reopened on the way."""
    sender = Sender(SPEC)
    for _ in range(8):
        ring = open_ring(tmp_path)
        put(ring, sender)
    assert sequences(ring) == [6, 7, 8]
    assert sequences(open_ring(tmp_path)) == [6, 7, 8]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("full", [False, True])
def test_death_before_a_stage_leaves_only_whole_segments(tmp_path: Path, stage: str, full: bool) -> None:
    """A process that dies before any stage of an insert loses at most the victim, and nothing is damaged."""
    ring, sender = open_ring(tmp_path), Sender(SPEC)
    for _ in range(5 if full else 2):
        put(ring, sender)
    before = sequences(ring)
    die_before(ring, stage)
    with pytest.raises(DeathError):
        put(ring, sender)
    again = open_ring(tmp_path)
    kept = before[1:] if full and stage != "invalidate" else before
    assert sequences(again) == kept
    assert again.state["damaged_slots"] == 0
    put(again, sender)
    assert max(sequences(again)) == sender.sequence


def test_generation_over_inserts_and_deaths_never_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations rise by one with each insert and jump past everything earlier with each opening."""
    seen: list[int] = []
    sender = Sender(SPEC)
    for _ in range(4):
        ring = open_ring(tmp_path)
        for _ in range(4):
            put(ring, sender)
            seen.append(ring.generation)
            assert ring.commit.max() == ring.generation
        ring.metadata["generation"][ring.next_slot] = ring.generation + 1  # written, never committed
    assert seen == sorted(set(seen))
    assert np.diff(seen[:4]).tolist() == [1, 1, 1]


def test_generation_after_lost_metadata_still_rises(tmp_path: Path) -> None:
    """Even when a power cut takes back all slots, a generation that a learner may hold is not given again."""
    ring = open_ring(tmp_path)
    put(ring, Sender(SPEC))
    held = ring.generation
    ring.metadata[:] = 0
    ring.commit[:] = 0
    again = open_ring(tmp_path)
    put(again, Sender(SPEC))
    assert again.generation > held


def test_generation_of_nonsense_in_an_empty_slot_is_not_believed(tmp_path: Path) -> None:
    """No checksum covers what lies in a slot that is not valid; one damaged word must not stop inserts."""
    ring, sender = open_ring(tmp_path), Sender(SPEC)
    put(ring, sender)
    ring.metadata["generation"][2] = 2**64 - 1
    again = open_ring(tmp_path)
    assert again.generation >> 32 == 2
    put(again, sender)
    assert sequences(again) == [1, 2]


@pytest.mark.parametrize("damage", ["row", "checksum", "generation", "owned", "rows", "before"])
def test_recover_damaged_slot_is_dropped_and_counted(tmp_path: Path, damage: str) -> None:
    """A slot that does not fit its checksum or its own numbers is invalid after opening; the rest stays."""
    ring, sender = open_ring(tmp_path), Sender(SPEC)
    for _ in range(3):
        put(ring, sender)
    if damage == "row":
        ring.columns["reward"][ring.slot_rows + 1] += 1
    else:
        ring.metadata[damage][1] += 5
    again = open_ring(tmp_path)
    assert again.valid_slots().tolist() == [0, 2]
    assert again.state["damaged_slots"] == 1
    assert again.next_slot == 0


def test_recover_damage_outside_valid_rows_is_harmless(tmp_path: Path) -> None:
    """Rows that no segment owns are not part of the checksum."""
    ring = open_ring(tmp_path)
    put(ring, Sender(SPEC))
    ring.columns["reward"][ring.slot_rows - 1] = np.nan
    assert open_ring(tmp_path).valid_slots().tolist() == [0]


def test_open_other_layout_names_both_values(tmp_path: Path) -> None:
    """A ring made for other settings is refused with both values and what to do."""
    open_ring(tmp_path, slots=3)
    with pytest.raises(ConfigError, match=r"slots is 3 there and 5 here.*new run directory"):
        open_ring(tmp_path, slots=5)
    with pytest.raises(ConfigError, match="spec is"):
        Ring(tmp_path, make_spec(stack=4), slots=3, segment_steps=4, n_step=3)


def test_open_damaged_layout_is_refused(tmp_path: Path) -> None:
    """A layout file that is not ours is a config error, not a crash."""
    (tmp_path / "layout.json").write_text("[")
    with pytest.raises(ConfigError, match="damaged"):
        open_ring(tmp_path)


def test_open_empty_observation_shape_is_refused(tmp_path: Path) -> None:
    """A column without values cannot be mapped and is named."""
    with pytest.raises(ConfigError, match="observation has a shape without any values"):
        Ring(tmp_path, make_spec(shape=(0,)), slots=3, segment_steps=4, n_step=3)


def test_files_of_a_new_ring_have_their_space_on_disk(tmp_path: Path) -> None:
    """A full disk is found when the ring is made, not by a write into a mapped file that ends the process."""
    ring = Ring(tmp_path, make_spec(shape=(1000,)), slots=20, segment_steps=50, n_step=3)
    sizes = [path.stat() for path in tmp_path.iterdir()]
    assert sum(size.st_size for size in sizes) > 4_000_000
    assert all(size.st_blocks * 512 >= size.st_size for size in sizes)
    ring.sync()


def test_ring_without_room_on_disk_is_refused_in_words(tmp_path: Path, monkeypatch) -> None:
    """The error says how much was wanted and what to do."""

    def full_disk(_handle: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(ConfigError, match=r"No space left.*capacity_steps"):
        Ring(tmp_path, make_spec(), slots=20, segment_steps=50, n_step=3)


def test_stored_twice_counts_steps_of_repeated_segments(tmp_path: Path) -> None:
    """A segment that lies in two slots is counted with its owned steps once."""
    ring, sender = open_ring(tmp_path), Sender(SPEC)
    put(ring, sender)
    assert ring.stored_twice() == 0
    sender.sequence -= 1
    put(ring, sender)
    assert ring.stored_twice() == 4
