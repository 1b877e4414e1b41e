"""The swarm that the other tests stand on: nodes that come and go, services that find each other by name."""

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import docker as docker_sdk
import pytest
from cluster import Cluster, MakeCluster
from docker_command import CommandFailed, docker

from rookery.testing.removal import sweep

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

IMAGE = "python:3.11-slim"
ASK = (
    "import socket, urllib.request as u; "
    "print(socket.gethostname(), u.urlopen('http://greeter:8000/hostname', timeout=5).read().decode())"
)


@pytest.fixture(scope="module")
def cluster(make_cluster: MakeCluster) -> Cluster:
    cluster = make_cluster(nodes=3, images=[IMAGE])
    cluster.label(cluster.nodes[1], greets="true")
    cluster.deploy(Path(__file__).with_name("greeting.yaml"), "hello", {"GUESTS": "3"})
    return cluster


def test_services_on_different_nodes_reach_each_other_by_name(cluster: Cluster) -> None:
    """Placement follows labels, and every node can ask the one service that is on another."""
    [greeter] = cluster.wait_until_runs("hello_greeter", 1)
    guests = cluster.wait_until_runs("hello_guest", 3)
    assert greeter.node == "node-2"
    assert sorted(guest.node for guest in guests) == ["node-1", "node-2", "node-3"]
    for guest in guests:
        said = cluster.node(guest.node).docker("exec", guest.container, "python", "-c", ASK)
        assert said.split() == [guest.container[:12], greeter.container[:12]]
    assert "GET /hostname" in cluster.logs("hello_greeter")


def test_tasks_of_a_lost_node_are_placed_on_the_others(cluster: Cluster) -> None:
    """A machine that is gone costs its tasks their place, not their number; back again it takes new ones."""
    lost = cluster.nodes[2]
    cluster.take_away(lost)
    places = {task.node for task in cluster.wait_until_runs("hello_guest", 3)}
    assert lost.name not in places
    assert cluster.exec("hello_guest", ["python", "-c", ASK])
    cluster.bring_back(lost)
    cluster.scale("hello_guest", 5)
    cluster.wait_until_runs("hello_guest", 5)
    assert lost.name in cluster.places("hello_guest")


def test_a_new_node_gets_tasks_when_a_service_grows(cluster: Cluster) -> None:
    """The newest machine has the fewest tasks, so that is where the next ones go."""
    added = cluster.add_node([IMAGE])
    cluster.scale("hello_guest", 7)
    cluster.wait_until_runs("hello_guest", 7)
    assert added.name in cluster.places("hello_guest")


def test_a_service_that_cannot_run_says_why(cluster: Cluster) -> None:
    """Whoever waits in vain reads what each task suffered from."""
    cluster.manager.docker(
        "service", "create", "--detach", "--name", "broken", "--no-resolve-image", "not-there:1"
    )
    # Tasks that are newer than the rejected one may stand before it.
    rejected = r"(?s)1 of broken run.*\nbroken\.1 on node-\d: rejected[^\n]*not-there:1"
    with pytest.raises(AssertionError, match=rejected):
        cluster.wait_until_runs("broken", 1, timeout_s=15)
    with pytest.raises(CommandFailed, match="nothing of broken runs"):
        cluster.exec("broken", ["true"])


OWNER = """
import sys
from cluster import Cluster
cluster = Cluster()
cluster.start(1)
print(cluster.name, flush=True)
sys.stdin.read()
"""

INTERRUPTED = """
import sys
from conftest import make_cluster

def test_that_waits_for_ever(make_cluster):
    print(make_cluster(1).name, flush=True)
    sys.stdin.read()
"""


def start_python(*arguments: str) -> subprocess.Popen[str]:
    """A process that can import what is beside this file and above it."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [here, *here.parents[:2]]))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True)


def belongings(cluster_name: str) -> list[str]:
    """Everything of a cluster that the machine's engine has."""
    listings = [
        ("container", "ls", "--all", "--format", "{{.Names}}"),
        ("network", "ls", "--format", "{{.Name}}"),
        ("volume", "ls", "--format", "{{.Name}}"),
    ]
    names = [name for listing in listings for name in docker(*listing).split()]
    return [name for name in names if name.startswith(cluster_name)]


def test_what_a_killed_owner_left_is_swept_and_nothing_else(cluster: Cluster) -> None:
    """Containers, networks and volumes of a test run that was killed are gone after the next one's start."""
    ours = belongings(cluster.name)
    client = docker_sdk.from_env()
    with closing(client), start_python("-c", OWNER) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        sweep(client)
        assert len(belongings(name)) == 3, "swept although its owner lives"
        owner.kill()
        owner.wait()
        assert len(belongings(name)) == 3
        assert name in sweep(client)
    assert not belongings(name)
    assert belongings(cluster.name) == ours


def test_an_interrupted_test_run_cleans_up(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a test leaves nothing on the engine."""
    (tmp_path / "test_waits.py").write_text(INTERRUPTED)
    with start_python("-m", "pytest", "-s", "-p", "no:cacheprovider", str(tmp_path)) as pytest_run:
        assert pytest_run.stdout is not None
        lines = iter(pytest_run.stdout.readline, "")
        name = next(found.group() for line in lines if (found := re.search(r"rookery-swarm-\w+", line)))
        assert len(belongings(name)) == 3
        pytest_run.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in pytest_run.stdout.read()
    assert not belongings(name)
