"""Whatever happens to the process that made a stack, nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
from small_stacks import Service, compose_file, idle, never_healthy
from waiting import wait_for

from rookery.testing.removal import PROJECT_LABEL, remove_everything
from rookery.testing.stack import Stack

pytestmark = pytest.mark.stack

MakeStack = Callable[..., Stack]
INTERRUPTED = 2  # pytest's exit code for it

CHILD = """
import time
from pathlib import Path

def test_child(rookery_stack):
    stack = rookery_stack([{file!r}], name={name!r}, deadline_s=300)
    Path({ready!r}).touch()
    {then}
"""
SLOW_TO_COME = {
    "first": never_healthy(),
    "last": idle(depends_on={"first": {"condition": "service_healthy"}}),
}


class ChildRun:
    """A pytest of its own with one test that makes a stack."""

    def __init__(self, directory: Path, services: dict[str, Service], then: str = "time.sleep(300)") -> None:
        self.ready = directory / "ready"
        self.name = f"{directory.name.replace('_', '-').lower()}-{os.getpid()}"
        file = compose_file(directory, services, volumes={"data": None})
        test = directory / "test_child.py"
        test.write_text(CHILD.format(file=str(file), name=self.name, ready=str(self.ready), then=then))
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "pytest", "-p", "rookery.testing.plugin", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(directory / "temporary"), str(test)]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def projects(self, engine: docker.DockerClient) -> set[str]:
        """The names of its stacks that have anything on the engine."""
        labelled = {"label": PROJECT_LABEL}
        found = [
            one.labels for one in engine.containers.list(all=True, filters=labelled, ignore_removed=True)
        ]
        found += [network.attrs["Labels"] for network in engine.networks.list(filters=labelled)]
        found += [volume.attrs["Labels"] for volume in engine.volumes.list(filters=labelled)]
        return {name for labels in found if (name := labels[PROJECT_LABEL]).startswith(self.name)}


@contextmanager
def child_run(
    engine: docker.DockerClient, directory: Path, services: dict[str, Service], **options: str
) -> Iterator[ChildRun]:
    """Ends it in any case, and removes what a failed test leaves."""
    directory.mkdir()
    child = ChildRun(directory, services, **options)
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.process.kill()
        sys.stdout.write(child.process.communicate()[0])  # pytest shows it if the test failed
        for project in child.projects(engine):
            remove_everything(engine, project)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["first_traces", "compose_waits", "health_is_awaited", "in_the_test"])
def test_interrupted_pytest_leaves_nothing(
    engine: docker.DockerClient, tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    """While the engine creates, while Compose waits, while we wait for health, and in the test itself."""
    services = {"health_is_awaited": {"one": never_healthy()}, "in_the_test": {"one": idle()}}
    with child_run(engine, tmp_path / moment, services.get(moment, SLOW_TO_COME)) as child:
        if moment == "in_the_test":
            wait_for(child.ready.exists, "the child's stack is up")
        else:
            wait_for(lambda: child.projects(engine), "the child's stack begins to exist", every_s=0.01)
        if moment in {"compose_waits", "health_is_awaited"}:
            wait_for(lambda: running(engine, child), "a container of the child's runs")
        child.process.send_signal(number)
        assert child.process.wait(60) == INTERRUPTED
        assert child.projects(engine) == set()


def running(engine: docker.DockerClient, child: ChildRun) -> bool:
    return any(one.name.startswith(child.name) for one in engine.containers.list(ignore_removed=True))


def test_next_stack_sweeps_what_a_killed_pytest_left_and_spares_the_living(
    engine: docker.DockerClient, rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """Nobody can clean up after `kill -9` of himself; the next one does, and only after the dead."""
    services = {"one": idle(restart="always", volumes=["data:/data"])}
    with (
        child_run(engine, tmp_path / "killed", services) as killed,
        child_run(engine, tmp_path / "living", services) as living,
    ):
        for child in (killed, living):
            wait_for(child.ready.exists, "the child's stack is up")
        killed.process.kill()  # not waited for: a zombie is dead, too
        neighbours = rookery_stack([compose_file(tmp_path, services, volumes={"data": None})])
        assert killed.projects(engine) == set()
        assert len(living.projects(engine)) == 1
        assert running(engine, living)
        assert neighbours.container("one").status == "running"


def test_stack_that_nobody_removed_is_removed_when_its_process_ends(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    """A script without `with`, and a thread that nobody can interrupt."""
    file = compose_file(tmp_path, {"one": idle()})
    script = f"""
import threading
from rookery.testing.stack import Stack
stacks = [Stack([{str(file)!r}]), Stack([{str(file)!r}])]
stacks[0].up()
thread = threading.Thread(target=stacks[1].up)
thread.start()
thread.join()
print(*(stack.project for stack in stacks if stack.leftovers()))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    projects = done.stdout.split()
    assert len(projects) == 2
    left = [engine.containers.list(all=True, filters={"label": f"{PROJECT_LABEL}={one}"}) for one in projects]
    assert left == [[], []]


def test_failed_test_has_the_logs_of_its_containers_in_its_report_and_directory(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    """They are gone when somebody looks; what they wrote is not."""
    services = {"one": idle(), "two": idle()}
    with child_run(engine, tmp_path / "failing", services, then="raise ValueError('of the test')") as child:
        output = child.process.communicate(timeout=120)[0]
        assert child.process.returncode == 1
        assert "ValueError: of the test" in output
        assert "logs of failing" in output
        assert "--- two-1 (running, health none, 0 restarts)\nstarted\n" in output
        kept = sorted(child.ready.parent.glob("temporary/test_child0/*-logs/*.log"))
        assert [(path.name, path.read_text()) for path in kept] == [
            ("one-1.log", "started\n"),
            ("two-1.log", "started\n"),
        ]
        assert child.projects(engine) == set()
