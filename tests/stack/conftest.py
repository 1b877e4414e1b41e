"""Fixtures of the tests that need a Docker engine; the modules beside the tests become importable."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from real_run import SMALL

from rookery.testing.plugin import require_engine
from rookery.testing.stack import OUR_COMPOSE_FILE

BUILD_S = 1_200.0


@pytest.fixture(scope="session", autouse=True)
def _engine_is_there() -> None:
    require_engine()


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    """The engine itself, to see what a stack does to it."""
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def rookery_image() -> str:
    """The image of this checkout as it is now; its tag is no other checkout's, nor the user's own."""
    checkout = hashlib.sha256(str(OUR_COMPOSE_FILE.parent).encode()).hexdigest()[:8]
    image = f"rookery:test-{checkout}"
    built = subprocess.run(
        ["docker", "compose", "--file", str(OUR_COMPOSE_FILE), "build", "keys"],  # one of many of this image
        env=os.environ | {"ROOKERY_IMAGE": image},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    if built.returncode:
        pytest.fail(f"the image cannot be built:\n{built.stdout}")
    return image


@pytest.fixture
def small_run() -> dict[str, Any]:
    """Settings with which a dozen containers learn something on two cores."""
    return dict(SMALL)
