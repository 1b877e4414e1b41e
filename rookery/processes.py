"""The processes of a local run: started, watched, started again when they die, and never left behind.

Each child holds the reading end of a pipe whose writing end only this process has: when this process is
gone, however it went, the children notice and end. They live in sessions of their own, so that the terminal's
Ctrl-C reaches the launcher alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from shared.logs import get_logger

log = get_logger()

FIRST_BACKOFF_S = 0.2
# Whoever lived this long is started again at once; others wait, twice as long each time, up to a limit.
KILLED_STABLE_S, KILLED_LAST_BACKOFF_S = 10.0, 5.0
# What ends by itself will likely do so again, and each start takes seconds of work from the others.
FAILED_STABLE_S, FAILED_LAST_BACKOFF_S = 60.0, 30.0
LAST_CHANCE_S = 0.2  # even when the grace is used up by others


@dataclass(slots=True)
class Child:
    """One service and how to start it."""

    instance: str
    module: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0  # of the running process, or of the last one
    started: float = 0.0
    restarts: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    due: float = field(default=0.0)  # when it may be started (again)
    finished: bool = False  # ended on purpose


class Processes:
    """All children of the launcher."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.children: dict[str, Child] = {}
        self._pipe_read, self._pipe_write = os.pipe()
        os.set_inheritable(self._pipe_read, True)

    def add(self, instance: str, service: str, arguments: list[str]) -> None:
        """Starts a service under this name."""
        child = Child(instance, f"services.{service}", [*arguments, "--instance", instance])
        self.children[instance] = child
        self._start(child)

    def reap(self) -> list[tuple[Child, int]]:
        """The children that ended since the last call, with their exit codes (negative: the signal)."""
        ended: list[tuple[Child, int]] = []
        for child in self.children.values():
            if child.process is not None and (code := child.process.poll()) is not None:
                child.process = None
                ended.append((child, code))
        return ended

    def start_again(self, child: Child, failed: bool) -> float:
        """Plans the next start; returns how long it waits. `failed`: it ended by itself, nobody killed it."""
        lived_s = time.monotonic() - child.started
        stable_s = FAILED_STABLE_S if failed else KILLED_STABLE_S
        last_s = FAILED_LAST_BACKOFF_S if failed else KILLED_LAST_BACKOFF_S
        child.backoff_s = FIRST_BACKOFF_S if lived_s > stable_s else min(last_s, 2 * child.backoff_s)
        wait_s = 0.0 if lived_s > stable_s else child.backoff_s
        child.due = time.monotonic() + wait_s
        return wait_s

    def start_due(self) -> None:
        """Starts what is due."""
        now = time.monotonic()
        for child in self.children.values():
            if child.process is None and not child.finished and child.due <= now:
                child.restarts += 1
                self._start(child)

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children.values() if child.process is not None]

    def end(self, grace_s: float) -> None:
        """SIGTERM, then after the grace SIGKILL; returns when no child is left."""
        for child in self.children.values():
            child.finished = True
        deadline = time.monotonic() + grace_s
        running = self.running
        # The parameter server last: until it has answered their goodbye the others would wait for it.
        self._end([child for child in running if child.module != "services.param_server"], deadline)
        self._end([child for child in running if child.module == "services.param_server"], deadline)
        os.close(self._pipe_read)
        os.close(self._pipe_write)

    def _end(self, children: list[Child], deadline: float) -> None:
        for child in children:
            assert child.process is not None
            child.process.send_signal(signal.SIGTERM)
        for child in children:
            assert child.process is not None
            try:
                child.process.wait(max(LAST_CHANCE_S, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("did not end in time; killed", instance=child.instance)
                child.process.kill()
                child.process.wait()
            child.process = None

    def _start(self, child: Child) -> None:
        command = [sys.executable, "-m", child.module, *child.arguments, "--parent-fd", str(self._pipe_read)]
        with (self._logs / f"{child.instance}.log").open("ab") as output:
            child.process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own modules
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._pipe_read,),
                start_new_session=True,
                env=_environment(),
            )
        child.pid = child.process.pid
        child.started = time.monotonic()
        child.due = float("inf")


def _environment() -> dict[str, str]:
    """One thread for each process: several share few cores, and threads that wait for others only spin."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
    return inherited | threads
