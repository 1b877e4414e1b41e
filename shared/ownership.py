"""One process for each directory of state: a second one is refused instead of damaging it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError

PATIENCE_S = 6.0
RETRY_S = 0.1


def own(path: Path) -> int:
    """Locks this file for the life of the process; the system frees it however the process ends.

    Returns the descriptor, which must stay open. One whose launcher was killed a moment ago may still be
    winding down: that long it is waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if not _locked_within(descriptor, PATIENCE_S):
        holder = os.read(descriptor, 100).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(
            f"{path.parent} belongs to a running process (pid {holder or 'unknown'}); "
            "end that one first, or use another --run-dir"
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Owns this file for the time of a `with`."""
    descriptor = own(path)
    try:
        yield
    finally:
        os.close(descriptor)


def owner_of(path: Path) -> str:
    """The pid, as text, of the living process that owns this file; empty: nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return ""
    try:
        if _locked_within(descriptor, 0.0):
            return ""
        return os.read(descriptor, 100).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)


def _locked_within(descriptor: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(RETRY_S)  # flock has no time limit of its own, and nothing else runs yet
        else:
            return True
