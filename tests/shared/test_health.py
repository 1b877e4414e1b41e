"""Health checks: asked as a container engine does, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import health
from shared.errors import ConfigError
from shared.health_socket import Health, HealthSocket
from shared.loop import Loop


class Patient:
    """A loop in a thread that answers with whatever health is set."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.health = Health(True, "ready")
        self.loop = Loop()
        self.socket = HealthSocket(self.loop, self.path, lambda: self.health)
        self.thread = threading.Thread(target=self.turn)
        self.thread.start()

    def turn(self) -> None:
        while not self.loop.stopping:
            self.loop.turn(block=True)

    def close(self) -> None:
        self.loop.stop("the test is over")
        self.loop.wake()
        self.thread.join()
        self.socket.close()
        self.loop.close()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    patient = Patient(tmp_path / "health.sock")
    yield patient
    patient.close()


def check(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "shared.health", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_ready_service_passes(patient: Patient) -> None:
    assert check(patient.path) == (0, "ready\n")


def test_service_that_waits_fails_and_says_for_what(patient: Patient) -> None:
    patient.health = Health(False, "waiting for the parameter server")
    assert check(patient.path) == (1, "waiting for the parameter server\n")


def test_service_that_waits_is_alive(patient: Patient) -> None:
    patient.health = Health(False, "waiting for the parameter server")
    assert check(patient.path, "--alive")[0] == 0


def test_no_service_fails_and_says_where_it_looked(tmp_path: Path) -> None:
    code, words = check(str(tmp_path / "nobody.sock"))
    assert code == 1
    assert "no answer at" in words
    assert "nobody.sock" in words


def test_nothing_to_ask_fails_and_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(health.PATH_VARIABLE, raising=False)
    code, words = check()
    assert code == 1
    assert health.PATH_VARIABLE in words


def test_service_that_hangs_fails_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is there and takes connections, but its loop does not turn."""
    monkeypatch.setattr(health, "TIMEOUT_S", 0.3)
    loop = Loop()
    stuck = HealthSocket(loop, str(tmp_path / "health.sock"), lambda: Health(True, "ready"))
    assert health.main([str(tmp_path / "health.sock")]) == 1
    loop.turn(block=False)  # it answers somebody who left
    stuck.close()
    loop.close()


def test_socket_of_a_killed_service_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    path.touch()
    patient = Patient(path)
    assert check(str(path)) == (0, "ready\n")
    patient.close()
    assert not path.exists()


def test_path_that_cannot_be_is_named(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match=r"run\.health_socket = .*nowhere/health.sock: No such file"):
        HealthSocket(loop, str(tmp_path / "nowhere" / "health.sock"), lambda: Health(True, "ready"))
    loop.close()


def test_check_loads_nothing_that_is_slow() -> None:
    """It is a new process every few seconds, in every container."""
    code = "import sys, shared.health; print({'zmq', 'numpy', 'pydantic', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.strip() == "set()"
