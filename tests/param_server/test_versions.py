from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.param_server.version_file import tensors_checksum
from services.param_server.versions import VersionStore
from shared.codec import Array
from shared.errors import Refused
from shared.specs import DType

Open = Callable[[], VersionStore]


@pytest.fixture
def reopen(tmp_path: Path) -> Open:
    return lambda: VersionStore(tmp_path / "params", keep=3)


def weights(value: float) -> dict[str, Array]:
    return {"w": np.full((2, 3), value, np.float32), "b": np.full(3, -value, np.float32)}


def publish(store: VersionStore, number: int, agent: str = "a") -> int:
    version, is_new = store.publish(agent, weights(number), publish_id=f"p{number}", updates=number, token=1)
    assert is_new
    return version


def file_of(tmp_path: Path, version: int) -> Path:
    return tmp_path / "params" / "a" / f"{version:08d}.safetensors"


def test_publish_of_each_agent_counts_from_one_without_gaps(reopen: Open) -> None:
    """Every agent has its own line of versions."""
    store = reopen()
    assert [publish(store, n) for n in (1, 2)] == [1, 2]
    assert publish(store, 1, agent="b") == 1
    assert store.versions("a") == (1, 2)
    assert store.versions("nobody") == ()


def test_publish_with_every_dtype_survives_a_restart_bit_for_bit(reopen: Open) -> None:
    """All element types, scalars, empty and non-contiguous tensors come back as they were."""
    base = np.arange(12).reshape(3, 4)
    tensors: dict[str, Array] = {dtype.value: base.astype(dtype.numpy).T for dtype in DType}
    tensors |= {"scalar": np.array(7, np.int64), "empty": np.zeros((0, 2), np.float32)}
    tensors["odd"] = np.array([np.nan, -0.0, np.inf], np.float32)
    reopen().publish("a", tensors, publish_id="x", updates=5, token=2)
    stored = reopen().load("a")
    assert (stored.version, stored.updates, stored.token, stored.publish_id) == (1, 5, 2, "x")
    assert stored.checksum == tensors_checksum(tensors)
    for name, array in tensors.items():
        assert stored.tensors[name].dtype == array.dtype
        assert stored.tensors[name].shape == array.shape
        assert stored.tensors[name].tobytes() == array.tobytes()


def test_publish_then_change_of_the_arrays_leaves_the_version_as_it_was(reopen: Open) -> None:
    """A version is a copy: the frames it came in may be reused, and nobody can write into it."""
    store, tensors = reopen(), weights(1)
    store.publish("a", tensors, publish_id="x", updates=1, token=1)
    tensors["w"][:] = 9
    assert store.load("a").tensors["w"][0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        store.load("a").tensors["w"][0, 0] = 3


@pytest.mark.parametrize("restart", [False, True])
def test_publish_repeated_gives_the_same_version(reopen: Open, restart: bool) -> None:
    """A repeated publish id is not a new version, neither the newest one nor the ones before it."""
    store = reopen()
    for n in (1, 2, 3):
        publish(store, n)
    store = reopen() if restart else store
    for n in (3, 2):
        assert store.publish("a", weights(9), publish_id=f"p{n}", updates=9, token=1) == (n, False)
    assert store.versions("a") == (1, 2, 3)
    assert publish(store, 4) == 4


@pytest.mark.parametrize(
    "tensors",
    [{}, {"w": np.zeros(2, np.complex64)}, {"w": np.zeros(2, ">f4")}, {"__metadata__": np.zeros(2)}],
)
def test_publish_of_what_cannot_be_stored_is_refused_and_counts_nothing(
    reopen: Open, tensors: dict[str, Array]
) -> None:
    """Bad weights use up no version."""
    store = reopen()
    with pytest.raises(Refused):
        store.publish("a", tensors, publish_id="x", updates=1, token=1)
    assert publish(store, 1) == 1


def test_newest_after_publish_reads_nothing_from_disk(reopen: Open, tmp_path: Path) -> None:
    """Snapshots of the newest version work even when its file is gone."""
    store = reopen()
    publish(store, 1)
    file_of(tmp_path, 1).unlink()
    newest = store.newest("a")
    assert newest is not None
    assert newest is store.load("a") is store.load("a", 1)
    assert store.newest("b") is None


def test_prune_keeps_the_last_versions_and_the_pinned_ones(reopen: Open, tmp_path: Path) -> None:
    """Three newest and every pinned version stay, also over restarts, until they are unpinned."""
    store = reopen()
    publish(store, 1)
    publish(store, 2)
    store.pin("a", 2)
    store = reopen()
    for n in (3, 4, 5, 6):
        publish(store, n)
    assert store.versions("a") == (2, 4, 5, 6)
    assert store.pinned("a") == (2,)
    assert store.load("a", 2).tensors["w"][0, 0] == 2
    store.unpin("a", 2)
    assert store.versions("a") == reopen().versions("a") == (4, 5, 6)
    assert not file_of(tmp_path, 2).exists()


def test_load_of_an_unknown_version_is_refused_with_those_kept(reopen: Open) -> None:
    """The reason names what can be had instead."""
    store = reopen()
    with pytest.raises(Refused, match="no version yet"):
        store.load("a")
    publish(store, 1)
    with pytest.raises(Refused, match=r"no version 7; kept are \[1\]"):
        store.load("a", 7)
    with pytest.raises(Refused):
        store.pin("a", 7)


def test_open_after_files_were_deleted_never_goes_back(reopen: Open, tmp_path: Path) -> None:
    """The high-water mark stands without any version file."""
    store = reopen()
    for n in (1, 2):
        publish(store, n)
        file_of(tmp_path, n).unlink()
    store = reopen()
    assert store.versions("a") == ()
    assert publish(store, 3) == 3


@pytest.mark.parametrize("mark", [b"", b"\0\0", None])
def test_open_with_a_lost_high_water_mark_counts_on_from_the_files(
    reopen: Open, tmp_path: Path, mark: bytes | None
) -> None:
    """A power cut may empty the mark; the names of the files say the same."""
    publish(reopen(), 1)
    path = tmp_path / "params" / "a" / "high_water"
    path.unlink() if mark is None else path.write_bytes(mark)
    assert publish(reopen(), 2) == 2


def test_open_with_leftovers_removes_them(reopen: Open, tmp_path: Path) -> None:
    """What a killed write left is no version."""
    publish(reopen(), 1)
    leftover = file_of(tmp_path, 2).with_suffix(".safetensors.tmp")
    leftover.write_bytes(b"half")
    assert publish(reopen(), 2) == 2
    assert not leftover.exists()


def test_load_of_a_version_damaged_while_running_is_refused(reopen: Open, tmp_path: Path) -> None:
    """An older version is checked when it is read."""
    store = reopen()
    publish(store, 1)
    publish(store, 2)
    data = bytearray(file_of(tmp_path, 1).read_bytes())
    data[-1] ^= 1
    file_of(tmp_path, 1).write_bytes(data)
    with pytest.raises(Refused) as caught:
        store.load("a", 1)
    assert caught.value.code == "version_damaged"


def test_open_with_a_pinned_file_damaged_stays_usable(reopen: Open, tmp_path: Path) -> None:
    """Damaged pins and damaged old files cost themselves, nothing else."""
    store = reopen()
    publish(store, 1)
    publish(store, 2)
    (tmp_path / "params" / "a" / "pins.json").write_bytes(b"[1,")
    file_of(tmp_path, 1).write_bytes(b"")
    store = reopen()
    assert store.versions("a") == (2,)
    assert store.pinned("a") == ()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_newest_file_damaged_anywhere_is_replaced_by_the_one_before(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Truncated at any byte or with any bit flipped: detected, said, and its number is not given again."""
    root = tmp_path_factory.mktemp("params")
    store = VersionStore(root / "params", keep=3)
    publish(store, 1)
    publish(store, 2)
    path = file_of(root, 2)
    contents = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(contents) - 1))
    if data.draw(st.booleans()):
        del contents[position:]
    else:
        contents[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(contents)
    with capture_logs() as logs:
        store = VersionStore(root / "params", keep=3)
    assert [entry["event"] for entry in logs] == ["version_damaged"]
    newest = store.newest("a")
    assert newest is not None
    assert (newest.version, newest.tensors["w"][0, 0]) == (1, 1)
    assert VersionStore(root / "params", keep=3).versions("a") == (1,)
    assert store.publish("a", weights(2), publish_id="p2", updates=2, token=1) == (3, True)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), max_size=12))
def test_versions_over_any_history_rise_and_repeats_agree(
    steps: list[tuple[int, bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With restarts and lost files in between, a new id gets a higher number and a kept id its old one."""
    root = tmp_path_factory.mktemp("params")
    store = VersionStore(root / "params", keep=3)
    highest, numbers = 0, dict[str, int]()
    for identity, restart, lose_newest in steps:
        publish_id = f"p{identity}"
        known = numbers.get(publish_id)
        expected_repeat = known is not None and known in store.versions("a")
        version, is_new = store.publish("a", weights(identity), publish_id=publish_id, updates=1, token=1)
        assert is_new is not expected_repeat
        assert version == (known if expected_repeat else highest + 1)
        highest, numbers[publish_id] = max(highest, version), version
        assert len(store.versions("a")) <= 3
        if lose_newest and restart:
            file_of(root, highest).unlink(missing_ok=True)
        if restart:
            store = VersionStore(root / "params", keep=3)


def test_store_with_stray_files_and_directories_opens_without_them(reopen: Open, tmp_path: Path) -> None:
    """What is not named like ours is not ours."""
    publish(reopen(), 1)
    (tmp_path / "params" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "params" / "a" / "5.safetensors").write_bytes(b"mine")
    store = reopen()
    assert store.agents() == ("a",)
    assert store.versions("a") == (1,)
    assert publish(store, 2) == 2
