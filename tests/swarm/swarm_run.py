"""A training run on a swarm, as its operator sees it: deployed from deploy/, asked with `rookery`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster import Cluster
from docker_command import CommandFailed, docker
from waiting import wait_for

from shared.messages import RunStatus

ROOT = Path(__file__).parents[2]
STACK = "rookery"
SERVICES = ("param_server", "replay", "learner", "actor")
PROGRESS_S = 120.0


class SwarmRun:
    """The services of one stack."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.versions: dict[str, int] = {}

    def deploy(self, image: str, keys: Path, settings: Path, learners: int, actors: int) -> None:
        """`settings` has the name that the stack file asks for; so have the files in `keys`."""
        environment = {
            "ROOKERY_IMAGE": image,
            "ROOKERY_KEYS": keys.name,
            "ROOKERY_LEARNERS": str(learners),
            "ROOKERY_ACTORS": str(actors),
        }
        self.cluster.deploy(ROOT / "deploy" / "stack.yaml", STACK, environment, beside=[keys, settings])

    # --- questions --------------------------------------------------------------------------------------

    def rookery(self, *arguments: str) -> str:
        """What `rookery ...` prints, beside the parameter server."""
        return self.cluster.exec(f"{STACK}_param_server", ["rookery", *arguments])

    def status(self) -> RunStatus | None:
        """The run's status; None while the parameter server does not answer."""
        try:
            said = json.loads(self.rookery("status", "--json"))
        except CommandFailed:
            return None
        if "run_id" not in said:  # read from its files
            return None
        del said["replay"]
        status = RunStatus.model_validate(said)
        self._check_versions(status)
        return status

    def _check_versions(self, status: RunStatus) -> None:
        """Whatever a test does: an agent's version never goes back."""
        for agent, own in status.agents.items():
            assert own.version >= self.versions.get(agent, 0), f"{agent} went back to {own.version}"
            self.versions[agent] = own.version

    def trains(self, more_than: RunStatus | None = None) -> RunStatus | None:
        """The status, if steps were played and every agent was updated and published since; else None."""
        status = self.status()
        if status is None or not status.agents:
            return None
        if more_than is None:
            return status if all(own.updates for own in status.agents.values()) else None
        beyond = all(
            own.updates > more_than.agents[agent].updates and own.version > more_than.agents[agent].version
            for agent, own in status.agents.items()
        )
        return status if beyond and status.agent_steps > more_than.agent_steps else None

    def wait_until_trains(
        self, more_than: RunStatus | None = None, what: str = "the run trains"
    ) -> RunStatus:
        found = wait_for(lambda: self.trains(more_than), what, PROGRESS_S, explain=self.describe)
        assert found is not None
        return found

    def final_ledger(self) -> dict[str, int]:
        """Every step ever played, asked after all actors have ended on purpose. Then they come back."""

        def nothing_moves() -> dict[str, int] | None:
            ledger: dict[str, int] = json.loads(self.rookery("ledger", "--json"))
            return None if ledger["in_flight"] else ledger

        actor = f"{STACK}_actor"
        actors = len(self.cluster.running(actor))
        self.cluster.stop(actor)
        ledger = wait_for(nothing_moves, "all steps have arrived", PROGRESS_S, explain=self.describe)
        self.cluster.scale(actor, actors)
        self.cluster.wait_until_runs(actor, actors)
        assert ledger is not None
        return ledger

    def events(self, service: str, event: str) -> list[dict[str, Any]]:
        """What containers of the service that can be asked logged under this name, oldest first."""
        lines = self.cluster.logs(f"{STACK}_{service}", lines=2_000).splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        return sorted((one for one in said if one["event"] == event), key=lambda one: one["timestamp"])

    def describe(self) -> str:
        """For whoever reads a failed test's report."""
        return "\n".join(self.cluster.describe(f"{STACK}_{service}") for service in SERVICES)


def make_keys(image: str, directory: Path) -> None:
    """With the image itself, as somebody does who has nothing else installed."""
    directory.mkdir()
    docker(
        *("run", "--rm", "--user", f"{directory.stat().st_uid}:{directory.stat().st_gid}"),
        *("--volume", f"{directory}:/keys", image, "rookery", "keys", "make", "/keys"),
    )
