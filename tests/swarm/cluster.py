"""A real swarm of several nodes on one machine: each node is a Docker engine in a privileged container.

Nodes have names, a network and volumes of their own; whatever a test does to them, `remove()` takes all of it
away. The first node is the manager and the one that is asked everything. Taking a node away kills its engine
with everything on it, as if the machine had lost its power; its disk stays, so it can come back.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker as docker_sdk
from docker_command import CommandFailed, docker, pipe
from waiting import wait_for

from rookery.testing import lifetime
from rookery.testing.compose import OWNER_LABEL
from rookery.testing.owner import Owner
from rookery.testing.removal import PROJECT_LABEL, remove_everything, sweep

NODE_IMAGE = "rookery-swarm-node"
START_S = 60.0
LOAD_S = 600.0
TASKS_S = 180.0
GONE_S = 90.0  # the manager misses three heartbeats before it believes that a node is down


@dataclass(frozen=True)
class Node:
    """One machine of the swarm."""

    name: str  # its host name, by which the swarm knows it
    container: str
    address: str

    def docker(self, *arguments: str, given: bytes | None = None, timeout_s: float = 120.0) -> str:
        """What `docker ...` prints on this node."""
        return docker(
            "exec", "--interactive", self.container, "docker", *arguments, given=given, timeout_s=timeout_s
        )


@dataclass(frozen=True)
class Task:
    """One container that the swarm wants or wanted somewhere."""

    service: str
    slot: int
    node: str  # empty while it has no place
    state: str  # what it is in
    wanted: str  # what the swarm wants it to be in
    error: str
    container: str
    image: str

    @property
    def runs(self) -> bool:
        return self.state == self.wanted == "running"

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        why = f" ({self.error})" if self.error else ""
        return f"{self.service}.{self.slot}{where}: {self.state}, wanted {self.wanted}{why}"


class Cluster:
    """A swarm; use it in a `with` or call `remove()`. It does not outlive the process that made it.

    To the engine it is a project like any stack of containers for tests, and is removed and swept as one.
    """

    def __init__(self) -> None:
        self.name = f"rookery-swarm-{secrets.token_hex(4)}"
        self.nodes: list[Node] = []
        self._made = 0
        labels = {PROJECT_LABEL: self.name, OWNER_LABEL: Owner.this_process().label}
        self._labels = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
        self._network_prefix = ""
        self._client = docker_sdk.from_env()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()

    # --- machines ---------------------------------------------------------------------------------------

    def start(self, nodes: int, images: Sequence[str] = ()) -> None:
        """Makes the swarm; every node gets these images."""
        sweep(self._client)
        lifetime.begins(self.name, self.remove)
        docker("build", "--quiet", "--tag", NODE_IMAGE, str(Path(__file__).parent), timeout_s=LOAD_S)
        self._make_network()
        for _ in range(nodes):
            self.add_node(images)

    def _make_network(self) -> None:
        """With a range of our own choice: only then can a node keep its address when it comes back."""
        for _ in range(20):
            prefix = f"10.213.{random.randrange(256)}"
            try:
                docker("network", "create", "--subnet", f"{prefix}.0/24", *self._labels, self.name)
            except CommandFailed as error:
                if "overlap" not in str(error):
                    raise
            else:
                self._network_prefix = prefix
                return
        raise CommandFailed("no range of addresses in 10.213.0.0/16 is free for a network of ours")

    @property
    def manager(self) -> Node:
        return self.nodes[0]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def add_node(self, images: Sequence[str] = ()) -> Node:
        """One more machine, with its engine up, a member of the swarm."""
        self._made += 1
        node = Node(
            name=f"node-{self._made}",
            container=f"{self.name}-{self._made}",
            address=f"{self._network_prefix}.{self._made + 1}",
        )
        docker("volume", "create", *self._labels, node.container)
        docker(
            *("run", "--detach", "--privileged", "--name", node.container, "--hostname", node.name),
            *("--network", self.name, "--ip", node.address, *self._labels),
            *("--volume", f"{node.container}:/var/lib/docker", NODE_IMAGE),
        )
        self.nodes.append(node)
        self._wait_for_engine(node)
        for image in images:
            self.hand_over(image, node)
        self._join(node)
        return node

    def _wait_for_engine(self, node: Node) -> None:
        def answers() -> bool:
            try:
                node.docker("info")
            except CommandFailed:
                return False
            return True

        wait_for(
            answers,
            f"the engine of {node.name} answers",
            START_S,
            explain=lambda: docker("logs", "--tail", "20", node.container, text_of_both=True),
        )

    def _join(self, node: Node) -> None:
        if node is self.manager:
            node.docker("swarm", "init", "--advertise-addr", node.address)
            return
        token = self.manager.docker("swarm", "join-token", "--quiet", "worker").strip()
        node.docker("swarm", "join", "--token", token, f"{self.manager.address}:2377")
        self.wait_until_seen(node, "ready")

    def hand_over(self, image: str, node: Node) -> None:
        """Copies an image of this machine to a node, as one does without a registry."""
        pipe(["save", image], ["exec", "--interactive", node.container, "docker", "load"], LOAD_S)

    def label(self, node: Node, **labels: str) -> None:
        """Names of labels cannot have dots here: `rookery__params` becomes rookery.params."""
        pairs = [f"{key.replace('__', '.')}={value}" for key, value in labels.items()]
        options = [word for pair in pairs for word in ("--label-add", pair)]
        self.manager.docker("node", "update", *options, node.name)

    def unlabel(self, node: Node, label: str) -> None:
        self.manager.docker("node", "update", "--label-rm", label, node.name)

    def take_away(self, node: Node) -> None:
        """The machine is gone without a word; returns when the swarm has noticed."""
        docker("kill", "--signal", "KILL", node.container)
        self.wait_until_seen(node, "down")

    def bring_back(self, node: Node) -> None:
        """The machine is switched on again, with its old disk."""
        docker("start", node.container)
        self._wait_for_engine(node)
        self.wait_until_seen(node, "ready")

    def reboot(self, node: Node) -> None:
        """A short power cut; also for the manager, without which the swarm cannot notice anything."""
        docker("kill", "--signal", "KILL", node.container)
        self.bring_back(node)

    def wait_until_seen(self, node: Node, state: str) -> None:
        """Until the manager says that the node is `ready` or `down`."""
        wait_for(
            lambda: self._node_states().get(node.name) == state,
            f"the swarm sees that {node.name} is {state}",
            GONE_S,
            explain=lambda: str(self._node_states()),
        )

    def _node_states(self) -> dict[str, str]:
        listed = self.manager.docker("node", "ls", "--format", "{{.Hostname}} {{.Status}}")
        return {name: status.lower() for name, status in map(str.split, listed.splitlines())}

    def remove(self) -> None:
        """All of it, whatever state it is in."""
        with lifetime.uninterrupted(f"removing {self.name}"):
            remove_everything(self._client, self.name)
            lifetime.ended(self.name)
            self._client.close()

    # --- stacks -----------------------------------------------------------------------------------------

    def deploy(
        self,
        stack_file: Path,
        name: str,
        environment: Mapping[str, str] | None = None,
        beside: Iterable[Path] = (),
    ) -> None:
        """`docker stack deploy` on the manager; `beside`: files and directories that the stack file names."""
        place = f"/stacks/{name}"
        docker("exec", self.manager.container, "mkdir", "-p", place)
        for path in (stack_file, *beside):
            docker("cp", str(path), f"{self.manager.container}:{place}/")
        settings = [
            word for key, value in (environment or {}).items() for word in ("--env", f"{key}={value}")
        ]
        docker(
            *("exec", *settings, "--workdir", place, self.manager.container, "docker", "stack", "deploy"),
            *("--resolve-image", "never", "--compose-file", stack_file.name, name),
        )

    def remove_stack(self, name: str) -> None:
        """`docker stack rm`, until its containers are gone. Volumes stay."""
        self.manager.docker("stack", "rm", name)
        self._wait_until_gone("--all", "--filter", f"label=com.docker.stack.namespace={name}")

    def scale(self, service: str, replicas: int) -> None:
        self.manager.docker("service", "scale", "--detach", f"{service}={replicas}")

    def stop(self, service: str) -> None:
        """Scales it to none, until all of it has ended."""
        self.scale(service, 0)
        self._wait_until_gone("--filter", f"label=com.docker.swarm.service.name={service}")

    def _wait_until_gone(self, *options: str) -> None:
        living = self.living_nodes()
        wait_for(
            lambda: not any(node.docker("container", "ls", "--quiet", *options).split() for node in living),
            f"no node has containers any more with {' '.join(options)}",
            TASKS_S,
        )

    def copy_volume(self, volume: str, image: str, source: Node, target: Node) -> None:
        """Everything in it, as somebody does who moves a service with its data."""

        def tar(node: Node, *arguments: str) -> list[str]:
            within = ["docker", "run", "--rm", "--interactive", "--volume", f"{volume}:/data", image]
            return ["exec", "--interactive", node.container, *within, "tar", "-C", "/data", *arguments]

        pipe(tar(source, "-c", "."), tar(target, "-x"), LOAD_S)

    # --- questions --------------------------------------------------------------------------------------

    def tasks(self, service: str) -> list[Task]:
        """All of them, old ones too, by slot."""
        names = self._node_names()
        found = [
            Task(
                service=service,
                slot=own.get("Slot", 0),
                node=names.get(own.get("NodeID", ""), ""),
                state=own["Status"]["State"],
                wanted=own["DesiredState"],
                error=own["Status"].get("Err", ""),
                container=own["Status"].get("ContainerStatus", {}).get("ContainerID", ""),
                image=own["Spec"]["ContainerSpec"]["Image"],
            )
            for own in self._inspect_tasks(service)
        ]
        return sorted(found, key=lambda task: task.slot)

    def _inspect_tasks(self, service: str) -> list[dict[str, Any]]:
        """The swarm forgets old tasks at any time; one that went after it was listed means to list again."""
        while True:
            ids = self.manager.docker("service", "ps", "--quiet", "--no-trunc", service).split()
            if not ids:
                return []
            try:
                return json.loads(self.manager.docker("inspect", "--type", "task", *ids))
            except CommandFailed as error:
                if "No such task" not in str(error):
                    raise

    def _node_names(self) -> dict[str, str]:
        listed = self.manager.docker("node", "ls", "--format", "{{.ID}} {{.Hostname}}")
        return dict(line.split() for line in listed.splitlines())

    def running(self, service: str) -> list[Task]:
        return [task for task in self.tasks(service) if task.runs]

    def places(self, service: str) -> list[str]:
        """The nodes that run it, once for each task."""
        return [task.node for task in self.running(service)]

    def wait_until_runs(self, service: str, replicas: int, timeout_s: float = TASKS_S) -> list[Task]:
        """Until so many tasks run, healthy if the service has a health check, and none on a lost node."""

        def all_run() -> tuple[list[Task]] | None:
            running = self.running(service)
            return (running,) if len(running) == replicas else None

        found = wait_for(
            all_run, f"{replicas} of {service} run", timeout_s, explain=lambda: self.describe(service)
        )
        assert found is not None
        return found[0]

    def describe(self, service: str) -> str:
        """For whoever reads a failed test's report."""
        tasks = "\n".join(map(str, self.tasks(service)))
        return f"{tasks}\nlast words of {service}:\n{self.logs(service, lines=20)}"

    def exec(self, service: str, command: Sequence[str], timeout_s: float = 60.0) -> str:
        """What a command prints in one of the service's containers."""
        running = self.running(service)
        if not running:
            raise CommandFailed(f"nothing of {service} runs\n{self.describe(service)}")
        task = running[0]
        return self.node(task.node).docker("exec", task.container, *command, timeout_s=timeout_s)

    def logs(self, service: str, lines: int = 200) -> str:
        """The last lines of each of the service's containers, stopped ones too, on nodes that can be asked.

        (`docker service logs` fails as a whole when one of the nodes is lost.)
        """
        of_service = ["--all", "--quiet", "--filter", f"label=com.docker.swarm.service.name={service}"]
        tail = ("docker", "logs", "--tail", str(lines))
        said = [
            docker("exec", node.container, *tail, container, text_of_both=True)
            for node in self.living_nodes()
            for container in node.docker("container", "ls", *of_service).split()
        ]
        return "".join(said)

    def living_nodes(self) -> list[Node]:
        states = self._node_states()
        return [node for node in self.nodes if states[node.name] == "ready"]


MakeCluster = Callable[..., Cluster]
