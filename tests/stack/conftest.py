"""Fixtures of the tests that need a Docker engine; the modules beside the tests become importable."""

import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    """The engine itself, to see what a stack does to it."""
    client = docker.from_env()
    yield client
    client.close()
