"""Fixtures of the tests that need a Docker engine; the modules beside the tests become importable."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from real_run import PROJECT, SMALL

from rookery.testing.engine import in_ci, what_is_missing

IMAGE = "rookery:tests"
BUILD_S = 1_200.0


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    """The engine itself, to see what a stack does to it."""
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def rookery_image() -> str:
    """The project's own image, built from this checkout; only the first build takes long."""
    if missing := what_is_missing():
        (pytest.fail if in_ci() else pytest.skip)(missing)
    command = ["docker", "build", "--quiet", "--tag", IMAGE, str(PROJECT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if built.returncode:
        pytest.fail(f"the image cannot be built:\n{built.stderr[-4_000:]}")
    return IMAGE


@pytest.fixture
def small_run() -> dict[str, Any]:
    """Settings with which a dozen containers learn something on two cores."""
    return dict(SMALL)
