"""Machines without Docker: tests are skipped with a reason, in CI they fail with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEST = "def test_of_a_stack(rookery_stack):\n    raise AssertionError('never reached')\n"
FAILING_DOCKER = """#!/bin/sh
test "$1 $2" = "{works}" && exit 0
echo "{complaint}" >&2
exit 1
"""


def docker_that_only(works: str, complaint: str, directory: Path) -> None:
    """A docker command that fails in all but one thing."""
    command = directory / "docker"
    command.write_text(FAILING_DOCKER.format(works=works, complaint=complaint))
    command.chmod(0o755)


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with a PATH on which there is only what the directory has."""
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    path = {"PATH": str(directory), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=inherited | path | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("docker", "missing"),
    [
        (None, "the docker command, which is not on the PATH: install Docker Engine"),
        (
            ("info", "unknown command"),
            "Docker Compose, but `docker compose version` fails: install Docker Engine",
        ),
        (("compose version", "cannot connect"), "none answers: start it"),
    ],
)
def test_missing_part_is_named_with_the_way_to_get_it(
    tmp_path: Path, docker: tuple[str, str] | None, missing: str
) -> None:
    """By the command that `make test-stack` begins with."""
    if docker:
        docker_that_only(*docker, tmp_path)
    answer = run(tmp_path, "-m", "rookery.testing.engine")
    assert answer.returncode == 1
    assert missing in answer.stderr
    assert docker is None or docker[0] == "info" or docker[1] in answer.stderr


@pytest.mark.parametrize(("in_ci", "outcome"), [("false", "1 skipped"), ("true", "1 error")])
def test_tests_without_an_engine_are_skipped_but_fail_in_ci(tmp_path: Path, in_ci: str, outcome: str) -> None:
    """Skipped tests in CI would look as if they had passed."""
    (tmp_path / "test_one.py").write_text(TEST)
    answer = run(tmp_path, "-m", "pytest", "-rs", "-p", "rookery.testing.plugin", CI=in_ci)
    assert outcome in answer.stdout
    assert "which is not on the PATH: install Docker Engine" in answer.stdout
    assert "never reached" not in answer.stdout


def test_tests_without_the_package_docker_are_skipped_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    """The plugin itself can be loaded without it."""
    (tmp_path / "test_one.py").write_text(TEST)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['docker'] = None\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    answer = run(tmp_path, "-m", "pytest", "-rs", "-p", "rookery.testing.plugin", PYTHONPATH=path)
    assert "1 skipped" in answer.stdout
    assert "pip install 'rookery[testing]'" in answer.stdout
