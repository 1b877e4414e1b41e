"""A swarm of nested Docker engines for the tests here; the modules beside them become importable."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other directories have a conftest of their own

from cluster import Cluster, MakeCluster
from outer_engine import sweep_leftovers


@pytest.fixture(scope="module")
def make_cluster() -> Iterator[MakeCluster]:
    """Makes swarms; none outlives the module, and those of test runs that were killed are swept first."""
    sweep_leftovers()
    clusters: list[Cluster] = []

    def make(nodes: int, images: Sequence[str] = ()) -> Cluster:
        clusters.append(Cluster())
        clusters[-1].start(nodes, images)
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.remove()
