"""What the actors have played, counted exactly once. Owns `progress.jsonl`: one line for each summary taken.

A line is one write call, so a killed process loses nothing that was confirmed; a line that a power cut tore
is cut off at open. The totals, and the number up to which each incarnation's summaries are taken, are never
stored: they are rebuilt from the lines.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
import structlog
from pydantic import BaseModel, ConfigDict

from services.param_server.atomic_file import storage_errors
from shared.messages import EpochSummary, Tally

RECENT_EPOCHS = 200

log = structlog.get_logger()


class ProgressLine(BaseModel):
    """One taken summary; `t` is the run clock in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    t: float
    actor: int
    incarnation: str
    number: Tally
    epochs: Tally
    env_steps: Tally
    agent_steps: Tally
    return_sums: dict[str, float]


@dataclass(slots=True)
class Totals:
    """Sums over everything taken."""

    epochs: int = 0
    env_steps: int = 0
    agent_steps: int = 0
    return_sums: dict[str, float] = field(default_factory=dict)


class Progress:
    """Takes summaries in order and adds them up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken: dict[str, int] = {}
        self.steps_by: dict[str, int] = {}  # incarnation: agent steps in all its summaries
        self._recent: dict[str, deque[tuple[int, float]]] = {}
        self.totals = Totals()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._size_bytes = self._rebuild()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def close(self) -> None:
        os.close(self._descriptor)

    def last_taken(self, incarnation: str) -> int:
        return self._taken.get(incarnation, 0)

    def take(self, incarnation: str, actor_index: int, summary: EpochSummary, t: float) -> int:
        """Counts a summary unless it is a repeat; returns the last number taken from this incarnation."""
        last = self.last_taken(incarnation)
        if summary.number <= last:
            return last
        if summary.number > last + 1:
            # The sender goes on only after a confirmation: what is missing was confirmed and lost with the
            # disk. Refusing what comes after it would lose that too, for ever.
            log.warning("summaries_missing", incarnation=incarnation, last=last, number=summary.number)
        line = ProgressLine(
            t=round(t, 3),
            actor=actor_index,
            incarnation=incarnation,
            number=summary.number,
            epochs=summary.epochs,
            env_steps=summary.env_steps,
            agent_steps=summary.agent_steps,
            return_sums=_finite(summary.return_sums),
        )
        self._append(line.model_dump_json().encode() + b"\n")
        self._count(line)
        return summary.number

    def recent_return(self, agent: str, epochs: int = RECENT_EPOCHS) -> float | None:
        """The mean return over about the newest `epochs` epochs (at most RECENT_EPOCHS); None: none yet."""
        total, played = 0.0, 0
        for count, return_sum in reversed(self._recent.get(agent, ())):
            total, played = total + return_sum, played + count
            if played >= epochs:
                break
        return total / played if played else None

    def _count(self, line: ProgressLine) -> None:
        self._taken[line.incarnation] = line.number
        self.steps_by[line.incarnation] = self.steps_by.get(line.incarnation, 0) + line.agent_steps
        self.totals.epochs += line.epochs
        self.totals.env_steps += line.env_steps
        self.totals.agent_steps += line.agent_steps
        for agent, return_sum in line.return_sums.items():
            self.totals.return_sums[agent] = self.totals.return_sums.get(agent, 0.0) + return_sum
            if line.epochs:
                self._remember(agent, line.epochs, return_sum)

    def _remember(self, agent: str, epochs: int, return_sum: float) -> None:
        recent = self._recent.setdefault(agent, deque())
        recent.append((epochs, return_sum))
        kept = sum(count for count, _ in recent)
        while kept - recent[0][0] >= RECENT_EPOCHS:
            kept -= recent.popleft()[0]

    def _append(self, data: bytes) -> None:
        with storage_errors(self._path):
            written = 0
            try:
                written = os.write(self._descriptor, data)
                if written != len(data):
                    raise OSError(f"only {written} of {len(data)} bytes fitted on the disk")
            except OSError:
                os.ftruncate(self._descriptor, self._size_bytes)
                raise
        self._size_bytes += len(data)

    def _rebuild(self) -> int:
        """Counts every whole line; returns where the last one ends, after cutting off what lies behind it."""
        data = self._path.read_bytes() if self._path.exists() else b""
        end = position = 0
        unreadable: list[int] = []
        for raw in data.splitlines(keepends=True):
            position += len(raw)
            if line := parsed_line(raw):
                end = position
                self._count(line)
            else:
                unreadable.append(position)
        if end < len(data):
            log.warning("progress_torn", cut_bytes=len(data) - end, consequence="the sender repeats it")
            os.truncate(self._path, end)
        if damaged := sum(position < end for position in unreadable):
            log.warning("progress_damaged", lines=damaged, consequence="these summaries are not counted")
        return end


def parsed_line(raw: bytes) -> ProgressLine | None:
    """A whole, valid line, or None."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return ProgressLine.model_validate_json(raw)
    except pydantic.ValidationError:
        return None


def _finite(return_sums: dict[str, float]) -> dict[str, float]:
    bad = sorted(agent for agent, value in return_sums.items() if not math.isfinite(value))
    if bad:
        log.warning("returns_not_finite", agents=bad, consequence="left out of the averages")
    return {agent: value for agent, value in return_sums.items() if agent not in bad}
