"""Files that are either whole or not there: the only way in which the parameter server writes state.

A file is written under a temporary name in its own directory, flushed to disk, renamed, and the directory is
flushed too; a crash at any moment leaves the old file or the new one. What a crash leaves under a temporary
name is removed when a store opens its directory. A disk that is full or broken becomes `Refused`
(code "storage_failed"): the request fails, the process and its other state live on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Refused
from shared.specs import AGENT_ID_PATTERN

TEMPORARY_SUFFIX = ".tmp"
DAMAGED_SUFFIX = ".damaged"


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by `data` as one step.

    Without `durable` a killed process still loses nothing, but a power cut may leave an empty file.
    """
    temporary = temporary_path(path)
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
            commit(temporary, path, durable=durable)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def commit(temporary: Path, path: Path, *, durable: bool = True) -> None:
    """Gives a finished temporary file its real name, its contents first."""
    if durable:
        _fsync(temporary)
    temporary.replace(path)
    if durable:
        _fsync(path.parent)


def temporary_path(path: Path) -> Path:
    """Where a file is written before it gets its real name."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def remove_leftover(path: Path) -> None:
    """Removes what a crash left of writing this one file; its directory may belong to others too."""
    temporary_path(path).unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Removes what a crash left under temporary names in a directory of our own."""
    for leftover in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Takes a damaged file out of use without destroying it."""
    path.replace(path.with_name(path.name + DAMAGED_SUFFIX))


def agent_directory(root: Path, agent: str) -> Path:
    """Where an agent's files live. "." and ".." match the id pattern but would leave `root`."""
    if not re.fullmatch(AGENT_ID_PATTERN, agent) or not agent.strip("."):
        raise Refused("unknown_agent", f"{agent!r} cannot be an agent's id: it does not name a directory")
    return root / agent


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns what the disk says into an answer for whoever asked."""
    try:
        yield
    except OSError as error:
        raise Refused("storage_failed", f"cannot write {path.name}: {error.strerror or error}") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
