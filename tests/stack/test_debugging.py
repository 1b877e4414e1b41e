"""One service runs on the host, as under a debugger, against the rest in containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_run import COMPOSE_FILE, DEBUG_FILE, PROJECT, START_S, RealRun, address
from waiting import wait_for

from rookery.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@contextmanager
def on_the_host(service: str, environment: dict[str, object], directory: Path) -> Iterator[Path]:
    """A service of this checkout, with the environment that docs/containers.md names; its log."""
    log = directory / f"{service}.log"
    texts = {name: str(value) for name, value in environment.items()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{service}", "--run-dir", str(directory / "debugged")],
            env={**os.environ, "OMP_NUM_THREADS": "1", **texts},
            cwd=PROJECT,
            stdout=output,
            stderr=output,
        )
        try:
            yield log
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0, log.read_text()[-3_000:]
        finally:
            process.kill()
            process.wait()


def test_learner_on_the_host(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object], tmp_path: Path
) -> None:
    """It connects to published ports with the run's keys and learns for the agent that has no learner."""
    stack = rookery_stack(
        [COMPOSE_FILE, DEBUG_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 2},
        environment=small_run,
        scale={"learner": 1},
        deadline_s=START_S,
    )
    run = RealRun(stack, tmp_path)
    replay = {"segments": address(run.replay, 5701), "requests": address(run.replay, 5702)}
    environment = {
        **small_run,
        "ROOKERY_WORLD__AGENTS": 2,
        "ROOKERY_SECURITY__KEYS": run.keys,
        "ROOKERY_ENDPOINTS__PARAMS": address(run.param_server, 5703),
        "ROOKERY_ENDPOINTS__BROADCAST": address(run.param_server, 5704),
        "ROOKERY_ENDPOINTS__REPLAY": f"[{replay}]",
    }
    with on_the_host("learner", environment, tmp_path) as log:
        run.wait_for_progress("both agents learn, one of them on the host")
        assert '"learning"' in log.read_text()


def test_replay_on_the_host(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object], tmp_path: Path
) -> None:
    """The others find it under its name, at the host's address."""
    stack = rookery_stack(
        [COMPOSE_FILE, DEBUG_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 1, "HOSTED": "replay"},
        environment=small_run,
        scale={"replay": 0},
        up=False,
    )
    stack.start()
    params = stack.container("param_server")
    params.wait_healthy(START_S)
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in params.exec("ls", "/keys").split():
        (keys / name).write_text(params.exec("cat", f"/keys/{name}"))
    environment = {
        **small_run,
        "ROOKERY_WORLD__AGENTS": 1,
        "ROOKERY_SECURITY__KEYS": keys,
        "ROOKERY_ENDPOINTS__LISTEN_ON": "0.0.0.0",
        "ROOKERY_ENDPOINTS__PARAMS": address(params, 5703),
        "ROOKERY_ENDPOINTS__BROADCAST": address(params, 5704),
    }
    with on_the_host("replay", environment, tmp_path) as log:
        wait_for(
            lambda: '"version": 3' in params.exec("rookery", "status", "--json"),
            "the agent learns from what the host keeps",
            START_S,
            every_s=1.0,
        )
        assert '"ready"' in log.read_text()
