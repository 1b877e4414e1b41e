"""Who owns a stack: one process, named so that others can tell later whether it still lives.

A process number alone is used again; together with the time of its start it is not. Numbers and times mean
something only on one host (and in one process namespace of it), so owners of elsewhere are never judged.
"""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns stacks."""

    host: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> Owner:
        started = _started(os.getpid())
        assert started is not None  # we are running
        return cls(_this_host(), os.getpid(), started)

    @classmethod
    def from_label(cls, label: str) -> Owner | None:
        """The owner that a label names, or None if it is none of our labels."""
        host, *rest = label.split(" ", 2)
        if len(rest) != 2 or not rest[0].isdecimal():
            return None
        return cls(host, int(rest[0]), rest[1])

    @property
    def label(self) -> str:
        return f"{self.host} {self.pid} {self.started}"

    @property
    def is_dead(self) -> bool:
        """True only if it is certain."""
        return self.host == _this_host() and _started(self.pid) != self.started


def _this_host() -> str:
    """The host's name, and on Linux the namespace that process numbers belong to."""
    namespace = PROC / "self/ns/pid"
    return f"{socket.gethostname()}/{namespace.readlink() if namespace.is_symlink() else ''}"


def _started(pid: int) -> str | None:
    """When a process started, as text to be compared; None if there is no such process any more."""
    return _started_by_proc(pid) if (PROC / "self/stat").exists() else _started_by_ps(pid)


def _started_by_proc(pid: int) -> str | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in brackets, which may contain blanks and brackets itself.
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    if state in "ZX":  # killed, and not yet waited for by its parent
        return None
    ticks_since_boot = fields[18]
    return f"{(PROC / 'sys/kernel/random/boot_id').read_text().strip()}+{ticks_since_boot}"


def _started_by_ps(pid: int) -> str | None:
    answer = subprocess.run(  # noqa: S603 - a number is the only argument
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],  # noqa: S607 - a system tool
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LC_ALL": "C"},
    )
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()
