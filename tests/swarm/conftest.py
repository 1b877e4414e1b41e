"""A swarm of nested Docker engines for the tests here; the modules beside them become importable."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other directories have a conftest of their own

from cluster import Cluster, MakeCluster

from rookery.testing.engine import in_ci, what_is_missing


@pytest.fixture(scope="module")
def make_cluster() -> Iterator[MakeCluster]:
    """Makes swarms; none outlives the module."""
    if missing := what_is_missing():
        (pytest.fail if in_ci() else pytest.skip)(missing)
    with ExitStack() as removals:

        def make(nodes: int, images: Sequence[str] = ()) -> Cluster:
            cluster = removals.enter_context(Cluster())
            cluster.start(nodes, images)
            return cluster

        yield make
