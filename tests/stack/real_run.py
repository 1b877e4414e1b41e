"""A run of the project's own compose file, watched from the host over the ports of the debug file."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_for

from rookery.client import RunClient
from rookery.ledger import add_up
from rookery.testing.container import Container
from rookery.testing.stack import Stack
from shared.config import Config, load_config
from shared.errors import RookeryError
from shared.keys import MEMBER_SECRET, SERVER_PUBLIC
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.loop import Loop
from shared.messages import ReplayStats, ReplayStatsRequest, RunStatus, expect

PROJECT = Path(__file__).parents[2]
COMPOSE_FILE = PROJECT / "compose.yaml"
DEBUG_FILE = PROJECT / "compose.debug.yaml"
START_S = 180.0  # until everything is healthy, on two cores that others use as well
RECOVERY_S = 90.0
SMALL = {  # so that a dozen containers learn something on two cores, and nothing is overwritten meanwhile
    "ROOKERY_ACTOR__ENVS": 4,
    "ROOKERY_REPLAY__CAPACITY_STEPS": 4_000_000,
    "ROOKERY_REPLAY__MIN_STEPS": 500,
    "ROOKERY_REPLAY__SAMPLES_PER_INSERT": 4,
    "ROOKERY_LEARNER__NETWORK__HIDDEN": "[32]",
    "ROOKERY_LEARNER__BATCH_SIZE": 32,
    "ROOKERY_LEARNER__PUBLISH_S": 0.5,
    "ROOKERY_LEARNER__CHECKPOINT_S": 2,
}


class RealRun:
    """Asks a stack's services as a member of its run; an agent's version that goes back fails the test."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self.stack = stack
        self.keys = directory / f"{stack.project}-keys"
        self.keys.mkdir()
        for name in (SERVER_PUBLIC, MEMBER_SECRET):
            (self.keys / name).write_text(self.param_server.exec("cat", f"/keys/{name}"))
        self.versions: dict[str, int] = {}

    # --- containers ---------------------------------------------------------------------------------------

    @property
    def param_server(self) -> Container:
        return self.stack.container("param_server")

    @property
    def replay(self) -> Container:
        return self.stack.container("replay")

    def of_agent(self, agent: str) -> Container:
        """The container of the learner that holds an agent's lease."""
        holder = self.status().agents[agent].learner
        return self.container_of(holder)

    def container_of(self, instance: str) -> Container:
        """A container's hostname is the beginning of its id."""
        host = next(each.host for each in self.status().services if each.instance == instance)
        return next(each for each in self.stack.containers() if each.id.startswith(host))

    # --- questions ----------------------------------------------------------------------------------------

    def config(self, keys: Path | None = None) -> Config:
        """The run's, as seen from the host."""
        replay = {
            "segments": address(self.replay, 5701),
            "requests": address(self.replay, 5702),
        }
        settings = [
            f"endpoints.params={address(self.param_server, 5703)}",
            f"endpoints.broadcast={address(self.param_server, 5704)}",
            f"endpoints.replay={json.dumps([replay])}",
            f"security.keys={keys or self.keys}",
        ]
        return load_config(None, settings, environment={})

    def status(self) -> RunStatus:
        with RunClient(self.config(), timeout_s=10.0) as client:
            status = client.status()
        for agent, own in status.agents.items():
            assert own.version >= self.versions.get(agent, 0), f"{agent} went back to {own.version}"
            self.versions[agent] = own.version
        return status

    def stats(self) -> ReplayStats:
        with RunClient(self.config(), timeout_s=10.0) as client:
            stats = client.replay_stats()[0]
        assert stats is not None, "replay does not answer"
        return stats

    def ledger(self) -> dict[str, int]:
        with RunClient(self.config(), timeout_s=10.0) as client:
            return add_up(client.ledgers(), client.produced(), client.living_actors())

    @contextmanager
    def replay_alone(self) -> Iterator[Callable[[], tuple[int, int]]]:
        """Asks replay itself, without the parameter server: steps that were ever inserted, and drawn."""
        run_id, loop = self.status().run_id, Loop()
        config = self.config()
        network = Network.of(config, loop)
        link = RequestSender(network, config.endpoints.replay[0].requests, identity=uuid.uuid4().hex)
        link.run = run_id

        def sums() -> tuple[int, int]:
            stats = expect(link.call(ReplayStatsRequest()).message, ReplayStats)
            buffers = stats.buffers.values()
            return sum(each.inserted_steps for each in buffers), sum(each.sampled_steps for each in buffers)

        yield sums
        network.close()
        loop.close()

    # --- waiting ------------------------------------------------------------------------------------------

    def trains(self, since: RunStatus | None, agents: Sequence[str]) -> RunStatus | None:
        """The status, if more was played and these agents (none named: all) have more updates than then."""
        try:
            now = self.status()
        except RookeryError:
            return None
        names = agents or list(now.agents)
        before = {name: since.agents[name].updates if since else 0 for name in names}
        further = bool(names) and all(now.agents[name].updates > before[name] for name in names)
        return now if further and now.agent_steps > (since.agent_steps if since else 0) else None

    def wait_for_progress(
        self, what: str, since: RunStatus | None = None, *agents: str, timeout_s: float = RECOVERY_S
    ) -> RunStatus:
        return wait_for(lambda: self.trains(since, agents), what, timeout_s, every_s=0.5)

    def wait_until(self, condition: Callable[[RunStatus], Any], what: str) -> RunStatus:
        """The first status for which the condition holds."""

        def seen() -> RunStatus | None:
            try:
                now = self.status()
            except RookeryError:
                return None
            return now if condition(now) else None

        return wait_for(seen, what, RECOVERY_S, every_s=0.5)

    def assert_balanced(self) -> dict[str, int]:
        """Every step is accounted for: none lost, none stored twice."""
        ledger = self.ledger()
        assert ledger["lost"] == ledger["stored_twice"] == 0, ledger
        known = ledger["stored"] + ledger["in_flight"] + ledger["abandoned"]
        assert ledger["produced"] == known, ledger
        return ledger


def address(container: Container, port: int) -> str:
    """Asked anew each time: a restarted container may be reached at another port."""
    host, published = container.published(port)
    return f"tcp://{host}:{published}"


def untouched(containers: Sequence[Container]) -> dict[str, tuple[str, int]]:
    """What changes when a container is restarted or made anew, by id."""
    return {each.id: (each.started_at, each.restarts) for each in containers}
