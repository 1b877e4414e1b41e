"""One process for each directory of state: a second one is refused instead of damaging it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from shared.errors import ConfigError


def own(path: Path) -> int:
    """Locks this file for the life of the process; the system frees it however the process ends.

    Returns the descriptor, which must stay open. A process that was killed a moment ago may still be going:
    whoever starts the next one starts it again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 100).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(
            f"{path.parent} belongs to a running process (pid {holder or 'unknown'}); "
            "end that one first, or use another --run-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
