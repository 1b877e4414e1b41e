from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.param_server.checkpoints import CheckpointStore
from shared.errors import Refused

Open = Callable[[], CheckpointStore]
CHUNK = 10


@pytest.fixture
def reopen(tmp_path: Path) -> Open:
    return lambda: CheckpointStore(tmp_path / "checkpoints", max_bytes=1000)


def add(store: CheckpointStore, name: str, data: bytes, offset: int, agent: str = "a") -> tuple[int, bool]:
    return store.add_chunk(agent, name, offset, len(data), zlib.crc32(data), data[offset : offset + CHUNK])


def upload(store: CheckpointStore, name: str, data: bytes, agent: str = "a") -> None:
    received, complete = 0, False
    while not complete:
        received, complete = add(store, name, data, received, agent)
    assert received == len(data)


def download(store: CheckpointStore, agent: str = "a") -> tuple[str, bytes] | None:
    data = b""
    while piece := store.piece(agent, len(data), 7):
        name, total_bytes, checksum, part = piece
        data += part
        if len(data) == total_bytes:
            assert zlib.crc32(data) == checksum
            return name, data
    return None


def test_upload_in_chunks_comes_back_in_pieces(reopen: Open) -> None:
    """What one learner uploads another one downloads, also after a restart."""
    store = reopen()
    assert download(store) is None
    upload(store, "one", bytes(range(95)))
    assert download(store) == ("one", bytes(range(95)))
    assert download(reopen()) == ("one", bytes(range(95)))
    assert download(store, "b") is None


def test_upload_unfinished_leaves_the_one_before(reopen: Open) -> None:
    """Only whole checkpoints are given out."""
    store = reopen()
    upload(store, "one", b"1" * 25)
    assert add(store, "two", b"2" * 25, 0) == (10, False)
    assert download(store) == ("one", b"1" * 25)


def test_chunk_repeated_changes_nothing(reopen: Open) -> None:
    """Repeats of any chunk, before and after the end, are answered with how much there is."""
    store, data = reopen(), bytes(range(25))
    assert add(store, "one", data, 0) == (10, False)
    assert add(store, "one", data, 0) == (10, False)
    assert add(store, "one", data, 10) == (20, False)
    assert add(store, "one", data, 0) == (20, False)
    assert add(store, "one", data, 20) == (25, True)
    for offset in (20, 0):
        assert add(store, "one", data, offset) == (25, True)
    assert add(reopen(), "one", data, 20) == (25, True)
    assert download(store) == ("one", data)


def test_chunk_that_overlaps_adds_only_what_is_new(reopen: Open) -> None:
    """A sender that changes its chunk size does no harm."""
    store, data = reopen(), bytes(range(25))
    add(store, "one", data, 0)
    assert add(store, "one", data, 5) == (15, False)
    upload(store, "one", data)
    assert download(store) == ("one", data)


def test_chunk_too_far_on_is_answered_with_where_to_go_on(reopen: Open) -> None:
    """After a restart the sender goes back to the beginning; a stray chunk replaces nothing."""
    store, data = reopen(), bytes(range(25))
    add(store, "one", data, 0)
    assert add(store, "one", data, 20) == (10, False)
    assert add(store, "two", data, 10) == (0, False)
    assert add(store, "one", data, 10) == (20, False)
    assert add(reopen(), "one", data, 20) == (0, False)


def test_chunk_of_a_new_checkpoint_replaces_an_unfinished_one(reopen: Open, tmp_path: Path) -> None:
    """A learner that came back begins anew; no leftovers stay."""
    store = reopen()
    add(store, "one", b"1" * 25, 0)
    upload(store, "two", b"2" * 25)
    assert download(store) == ("two", b"2" * 25)
    assert [path.name for path in (tmp_path / "checkpoints" / "a").iterdir()] == ["1.ckpt"]


def test_upload_with_a_wrong_checksum_is_refused_and_can_be_repeated(reopen: Open) -> None:
    """A damaged upload becomes no checkpoint."""
    store = reopen()
    upload(store, "one", b"1" * 5)
    with pytest.raises(Refused, match="send it again"):
        store.add_chunk("a", "two", 0, 5, 123, b"2" * 5)
    assert download(store) == ("one", b"1" * 5)
    upload(store, "two", b"2" * 5)
    assert download(store) == ("two", b"2" * 5)


def test_uploads_one_after_another_keep_the_newest_two(reopen: Open, tmp_path: Path) -> None:
    """Space is bounded; numbers go on after a restart."""
    for n in range(1, 5):
        upload(reopen(), f"c{n}", bytes([n]) * 15)
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "a").iterdir())
    assert names == ["3.ckpt", "4.ckpt"]


@pytest.mark.parametrize(
    ("offset", "total_bytes", "data"), [(0, 1001, b"x"), (0, 0, b""), (5, 10, b"123456"), (11, 10, b"")]
)
def test_chunk_that_cannot_be_is_refused(reopen: Open, offset: int, total_bytes: int, data: bytes) -> None:
    """Too large, empty, or beyond the end."""
    with pytest.raises(Refused):
        reopen().add_chunk("a", "one", offset, total_bytes, 0, data)


def test_chunk_without_bytes_changes_nothing(reopen: Open) -> None:
    """An empty array from the wire is answered like a repeat."""
    store = reopen()
    for empty in (b"", memoryview(np.zeros(0, np.uint8))):
        assert store.add_chunk("a", "one", 0, 10, 0, empty) == (0, False)


def test_piece_beyond_the_end_is_empty(reopen: Open) -> None:
    """Asking too far reads nothing and breaks nothing."""
    store = reopen()
    upload(store, "one", b"123")
    piece = store.piece("a", 99, 10)
    assert piece is not None
    assert piece[3] == b""


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_newest_file_damaged_anywhere_is_replaced_by_the_one_before(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Truncated at any byte or with any bit flipped: found at open, said, and the one before is used."""
    root = tmp_path_factory.mktemp("c")
    store = CheckpointStore(root)
    upload(store, "one", b"1" * 25)
    upload(store, "two", b"2" * 25)
    path = root / "a" / "2.ckpt"
    contents = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(contents) - 1))
    if data.draw(st.booleans()):
        del contents[position:]
    else:
        contents[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(contents)
    with capture_logs() as logs:
        store = CheckpointStore(root)
    assert [entry["event"] for entry in logs] == ["checkpoint_damaged"]
    assert download(store) == ("one", b"1" * 25)
    upload(store, "two", b"2" * 25)
    assert download(CheckpointStore(root)) == ("two", b"2" * 25)


@pytest.mark.parametrize("offset", [95, 2**62, 2**63 - 1])
def test_piece_from_beyond_the_end_is_empty(reopen: Open, offset: int) -> None:
    """Any offset may arrive; it must not reach the file."""
    store = reopen()
    upload(store, "one", bytes(range(95)))
    assert store.piece("a", offset, 7) == ("one", 95, zlib.crc32(bytes(range(95))), b"")


def test_checkpoint_whose_file_vanished_is_refused_in_words(reopen: Open, tmp_path: Path) -> None:
    """A file that a person deleted does not end the service."""
    store = reopen()
    upload(store, "one", b"1" * 25)
    (tmp_path / "checkpoints" / "a" / "1.ckpt").unlink()
    with pytest.raises(Refused, match=r"1\.ckpt"):
        store.piece("a", 0, 7)


def test_upload_beside_a_stray_file_is_kept(reopen: Open, tmp_path: Path) -> None:
    """What a person put into the directory is left alone."""
    store = reopen()
    upload(store, "one", b"1" * 25)
    stray = tmp_path / "checkpoints" / "a" / "backup.ckpt"
    stray.write_bytes(b"mine")
    for name in ("two", "three", "four"):
        upload(store, name, name.encode() * 9)
    assert download(reopen()) == ("four", b"four" * 9)
    assert stray.read_bytes() == b"mine"
