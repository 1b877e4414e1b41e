from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.param_server.atomic_file import (
    agent_directory,
    remove_leftovers,
    set_aside,
    temporary_path,
    write_atomic,
)
from shared.errors import Refused


def test_write_over_an_old_file_leaves_only_the_new_one(tmp_path: Path) -> None:
    """The new contents replace the old ones and nothing temporary stays."""
    path = tmp_path / "state"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_durable_flushes_the_file_before_and_the_directory_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents reach the disk before the name does, and the name before the call returns."""
    path = tmp_path / "state"
    events: list[str] = []

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        events.append(f"{name} named={path.exists()}")

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomic(path, b"x")
    assert events == ["state.tmp named=False", f"{tmp_path.name} named=True"]


def test_write_killed_before_the_rename_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that stops half way leaves the old contents; the leftover goes when the directory is opened."""
    path = tmp_path / "state"
    write_atomic(path, b"old")

    class Killed(BaseException):
        pass

    def die(self: Path, target: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(Killed):
            write_atomic(path, b"new")
    assert temporary_path(path).exists()
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert path.read_bytes() == b"old"


def test_write_on_a_full_disk_is_refused_and_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asker gets a reason, the old file stays and no temporary file eats more space."""
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refused, match="No space left") as caught:
        write_atomic(path, b"new")
    assert caught.value.code == "storage_failed"
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("agent", [".", "..", "a/b", "", "a\n", "...", "x" * 65])
def test_agent_directory_of_a_name_that_leaves_the_root_is_refused(tmp_path: Path, agent: str) -> None:
    """No agent's id can point outside the store."""
    with pytest.raises(Refused):
        agent_directory(tmp_path, agent)


def test_damaged_file_set_aside_keeps_its_bytes(tmp_path: Path) -> None:
    """What is damaged is out of the way but can still be looked at."""
    (tmp_path / "a").write_bytes(b"?")
    set_aside(tmp_path / "a")
    assert (tmp_path / "a.damaged").read_bytes() == b"?"
    assert not (tmp_path / "a").exists()
