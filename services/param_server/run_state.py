"""The run itself: its id, its state, its clock and its limits. Owns the run file.

running <-> paused; both -> draining -> finished; draining and finished -> running by `resume`, while no limit
is reached. The clock counts seconds of the state running only, and goes on where it stood after a restart:
it is stored at every change and every `PERSIST_EVERY_S` seconds, which is what a crash can take from it.
`now` is monotonic seconds.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from services.param_server.atomic_file import remove_leftover, write_atomic
from shared.errors import BrokenInvariant, Refused
from shared.messages import RunState

PERSIST_EVERY_S = 2.0

_MAY_BECOME: dict[RunState, tuple[RunState, ...]] = {
    "running": ("paused", "draining"),
    "paused": ("running", "draining"),
    "draining": ("finished", "running"),
    "finished": ("running",),
}


class _RunFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    state: RunState = "running"
    elapsed_s: float = Field(default=0.0, ge=0.0)


class RunBook:
    """The run's state machine and clock. Every change returns whether it changed anything."""

    def __init__(self, path: Path, *, minutes: float | None, agent_steps: int | None, now: float) -> None:
        self._path = path
        self._minutes = minutes
        self._agent_steps = agent_steps
        self._since = now
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftover(path)
        self._stored = _read(path) or self._write(_RunFile(run_id=uuid.uuid4().hex))

    @property
    def run_id(self) -> str:
        return self._stored.run_id

    @property
    def state(self) -> RunState:
        return self._stored.state

    def elapsed_s(self, now: float) -> float:
        running_s = max(0.0, now - self._since) if self.state == "running" else 0.0
        return self._stored.elapsed_s + running_s

    def pause(self, now: float) -> bool:
        return self._become("paused", now)

    def resume(self, now: float, agent_steps: int) -> bool:
        """Back to running; refused when that would end at once because a limit is reached."""
        reason = self.limit_reached(now, agent_steps)
        if self.state in ("draining", "finished") and reason:
            raise Refused("limit_reached", f"the run cannot resume: {reason}; raise the limit first")
        return self._become("running", now)

    def drain(self, now: float) -> bool:
        return self._become("draining", now) if self.state != "finished" else False

    def finish(self, now: float) -> bool:
        return self._become("finished", now)

    def tick(self, now: float) -> None:
        """Call it often: it stores the clock every few seconds."""
        if self.state == "running" and now - self._since >= PERSIST_EVERY_S:
            self._store(self.state, now)

    def limit_reached(self, now: float, agent_steps: int) -> str:
        """Which limit ends the run, in words; empty while none does."""
        elapsed_s = self.elapsed_s(now)
        if self._minutes is not None and elapsed_s >= self._minutes * 60.0:
            return f"{elapsed_s / 60.0:.1f} minutes trained, run.minutes is {self._minutes:g}"
        if self._agent_steps is not None and agent_steps >= self._agent_steps:
            return f"{agent_steps} agent steps played, run.agent_steps is {self._agent_steps}"
        return ""

    def _become(self, state: RunState, now: float) -> bool:
        if state == self.state:
            return False
        if state not in _MAY_BECOME[self.state]:
            allowed = " or ".join(_MAY_BECOME[self.state])
            raise Refused("bad_transition", f"a {self.state} run cannot become {state}, only {allowed}")
        self._store(state, now)
        return True

    def _store(self, state: RunState, now: float) -> None:
        changed = _RunFile(run_id=self.run_id, state=state, elapsed_s=self.elapsed_s(now))
        self._stored = self._write(changed)
        self._since = now

    def _write(self, contents: _RunFile) -> _RunFile:
        write_atomic(self._path, contents.model_dump_json().encode())
        return contents


def _read(path: Path) -> _RunFile | None:
    try:
        return _RunFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except pydantic.ValidationError as error:
        raise BrokenInvariant(
            f"{path.name} is damaged ({error.error_count()} problems): the run's id is in it; "
            "restore it from a backup"
        ) from None
