"""Real services around a learner: parameter server, replay and actor on one core, learners on the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from rookery.client import RunClient
from rookery.run_directory import create_run
from shared.config import load_config
from shared.errors import RookeryError
from worlds.registry import build_world

FILLED_STEPS = 60_000  # of each agent, before anything is measured
START_S = 120.0
AGENTS = {"prioritized": "agent_0", "uniform": "agent_1"}
SETTINGS = [
    "world.agents=2",
    "run.minutes=null",
    "replay.samples_per_insert=100000",  # nobody waits for inserts: what is measured is the learner
    "agents={agent_1: {priority: {alpha: 0}}}",
]


class Pipeline:
    """Two learners, one with priorities and one without, of which one at a time runs."""

    def __init__(self, path: Path, *, core: int, other: int) -> None:
        self.run_directory, self.config = create_run(load_config(None, SETTINGS, environment={}), path)
        self.spec = build_world(self.config.world, 1, 0).specs["agent_0"]
        self.core, self.other = core, other
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Pipeline:
        for service in ("param_server", "replay", "actor"):
            self._start(service, service, self.other)
        for name, agent in AGENTS.items():
            self._start("learner", name, self.core, "--agent", agent)
        self.client = self._connect()
        for name in AGENTS:
            self._until(lambda name=name: self._updates(name) > 0, f"{name} trains")
            self.client.control("pause", name)
        self._until(self._filled, "the buffers are filled")
        self.client.control("pause", "actor")
        return self

    def run(self, name: str, seconds: float) -> tuple[int, float]:
        """Lets one learner train; its updates and the time they took."""
        self.client.control("resume", name)
        before, started = self._updates(name), time.perf_counter()
        time.sleep(seconds)
        after, elapsed_s = self._updates(name), time.perf_counter() - started
        self.client.control("pause", name)
        return after - before, elapsed_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(20)

    def _start(self, service: str, instance: str, core: int, *arguments: str) -> None:
        config = ["--config", str(self.run_directory.config_path), "--run-dir", str(self.run_directory.path)]
        command = [sys.executable, "-m", f"services.{service}", *config, "--instance", instance, *arguments]
        with (self.run_directory.logs / f"{instance}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        os.sched_setaffinity(process.pid, {core})  # threads that it starts later inherit it
        self.processes.append(process)

    def _connect(self) -> RunClient:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return RunClient(self.config).__enter__()
            except RookeryError:
                if time.monotonic() > deadline:
                    raise

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {START_S:g} s: {what}; see {self.run_directory.logs}")
            time.sleep(0.1)

    def _updates(self, name: str) -> int:
        try:
            return int(self.client.control("status", name).metrics.get("updates", 0))
        except RookeryError:
            return 0

    def _filled(self) -> bool:
        stats = self.client.replay_stats()[0]
        return stats is not None and all(
            buffer.drawable_steps >= FILLED_STEPS for buffer in stats.buffers.values()
        )
