"""Why a process ended, in one line, from the end of its log."""

from __future__ import annotations

import json
from pathlib import Path

TAIL_BYTES = 1 << 16
TRACEBACK = "Traceback (most recent call last):"
STUCK = "Timeout ("  # how the watchdog's dump of all threads begins


def last_words(log: Path) -> str:
    """What was raised, what the last critical event says, or that it was stuck; empty: it does not say."""
    words, in_traceback = "", False
    for line in _tail(log):
        if line.startswith("{"):
            words, in_traceback = _critical_reason(line), False
        elif line.startswith(STUCK):  # "Timeout (0:01:05.250000)!"
            words = f"stuck for {line[len(STUCK) :].split(')')[0].split('.')[0]}; its log says where"
        elif line.startswith(TRACEBACK):
            in_traceback = True
        elif in_traceback and line and not line[0].isspace():
            words, in_traceback = line, False
        elif not words and line and not line[0].isspace():
            words = line  # for example of the parser of the command line
    return words


def _tail(log: Path) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        size_bytes = file.seek(0, 2)
        file.seek(max(0, size_bytes - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _critical_reason(line: str) -> str:
    """Of an event that ended the process; empty for any other."""
    try:
        event = json.loads(line)
    except ValueError:  # torn, or cut at the beginning of the tail
        return ""
    return str(event.get("reason", event.get("event", ""))) if event.get("level") == "critical" else ""
