"""A whole stack of containers for one test: its own project, network and volumes, gone when the test is over.

`docker compose` creates and removes it; everything else goes through the engine's own interface. Any number
of stacks live beside each other, in one process or in many, and none survives the process that made it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import docker

from rookery.testing import lifetime
from rookery.testing.compose import Compose, ComposeFailed, Overdue, made_own, read_files
from rookery.testing.container import SERVICE_LABEL, Container
from rookery.testing.engine import what_is_missing
from rookery.testing.errors import CommandFailed, StackError, Unhealthy, told_by_the_engine
from rookery.testing.health import HEALTHY_S, report, troubles_of, wait_until_well
from rookery.testing.owner import Owner
from rookery.testing.removal import PROJECT_LABEL, leftovers, remove_everything, sweep

OUR_COMPOSE_FILE = Path(__file__).parents[2] / "compose.yaml"
ENGINE_S = 120.0  # for one answer of the engine
COMPOSE_S = 300.0  # for a command of Compose's that waits for nothing but the engine
ONE_OFF_LABEL = "com.docker.compose.oneoff"


class Stack:
    """The services of some compose files, running; also a context manager that brings it up and removes it.

    `environment` is set in every container, over what the files say. `variables` are what the files may refer
    to as `${NAME}`. `scale` says how many containers a service has. Host ports are chosen by the engine (see
    `Container.published`), and fixed names of containers, networks and volumes are not used.
    """

    def __init__(
        self,
        files: Sequence[str | Path] = (OUR_COMPOSE_FILE,),
        *,
        environment: Mapping[str, object] | None = None,
        variables: Mapping[str, object] | None = None,
        scale: Mapping[str, int] | None = None,
        profiles: Sequence[str] = (),
        name: str = "rookery",
    ) -> None:
        self.project = f"{name}-{secrets.token_hex(4)}"
        if missing := what_is_missing():
            raise StackError(missing)
        self._client = docker.from_env(timeout=ENGINE_S)
        spec = read_files([Path(file).absolute() for file in files], self.project, _texts(variables))
        own = made_own(spec, self.project, Owner.this_process().label, _texts(environment))
        self._compose = Compose(self.project, own, profiles)
        for service, number in (scale or {}).items():
            self._compose.set_scale(service, number)

    def __repr__(self) -> str:
        return f"<stack {self.project}>"

    def __enter__(self) -> Stack:
        try:
            self.up()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # --- coming and going ---------------------------------------------------------------------------------

    def up(self, deadline_s: float = HEALTHY_S) -> None:
        """Creates and starts everything; returns when all containers are healthy, or raises Unhealthy.

        Healthy is: running, and well by its health check if it has one; or ended with 0, not to be restarted.
        """
        deadline = time.monotonic() + deadline_s
        self.start(deadline_s)
        wait_until_well(self.containers, max(0.0, deadline - time.monotonic()), may_have_finished=True)

    def start(self, deadline_s: float = HEALTHY_S) -> None:
        """Creates and starts everything, and waits for no more than `depends_on` does."""
        sweep(self._client)
        lifetime.begins(self.project, self.remove)
        try:
            self._compose.call("up", "--detach", "--quiet-pull", "--no-recreate", deadline_s=deadline_s)
        except (ComposeFailed, Overdue) as error:  # Compose itself waits where `depends_on` asks for health
            raise self._explained(error) from None

    def scale(self, deadline_s: float = HEALTHY_S, /, **services: int) -> None:
        """Makes it this many containers of each of these services, the new ones healthy; touches no other.

        A stopped container stays stopped and counts; a paused one of the same service is in Compose's way.
        """
        for service, number in services.items():
            self._compose.set_scale(service, number)
        before = {container.id for container in self.containers()}
        self._compose.call(
            "up", "--no-start", "--no-deps", "--no-recreate", "--quiet-pull", *services, deadline_s=COMPOSE_S
        )
        new = [container for container in self.containers() if container.id not in before]
        for container in new:
            container.start()
        wait_until_well(lambda: new, deadline_s, may_have_finished=True)

    def run(self, service: str, *command: str, deadline_s: float = COMPOSE_S) -> str:
        """The output of a command in a new container of a service: `docker compose run --rm`."""
        lifetime.begins(self.project, self.remove)
        try:
            return self._compose.call(
                "run", "--rm", "--no-TTY", "--no-deps", service, *command, deadline_s=deadline_s
            )
        except ComposeFailed as error:
            said = error.output + error.errors
            raise CommandFailed(" ".join(command), f"a new {service}", error.code, said) from None

    def down(self, volumes: bool = True) -> None:
        """Ends all containers with the grace that they have, and removes them; `volumes=False` keeps data."""
        # `down` alone would leave volumes without a name behind, and nobody could find them again.
        self._compose.call("rm", "--stop", "--force", "--volumes", deadline_s=COMPOSE_S)
        also = ["--volumes"] if volumes else []
        self._compose.call("down", "--remove-orphans", *also, deadline_s=COMPOSE_S)
        if volumes:
            self.remove()

    def remove(self) -> None:
        """Removes all of it at once, without any grace, whatever state it is in."""
        with lifetime.uninterrupted(f"removing {self.project}"):
            remove_everything(self._client, self.project)
            lifetime.ended(self.project)
            self._client.close()

    def leftovers(self) -> list[str]:
        """What exists of this stack now: containers, networks, volumes, images built for it alone."""
        with told_by_the_engine(f"listing what is left of {self.project}"):
            return [thing.name for thing in leftovers(self._client, self.project)]

    # --- its containers -----------------------------------------------------------------------------------

    def containers(self, service: str | None = None) -> list[Container]:
        """All containers, or those of a service, in order; stopped ones too."""
        labels = [f"{PROJECT_LABEL}={self.project}", f"{ONE_OFF_LABEL}=False"]
        if service is not None:
            labels.append(f"{SERVICE_LABEL}={service}")
        with told_by_the_engine(f"listing the containers of {self.project}"):
            found = self._client.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return sorted(map(Container, found), key=lambda one: (one.service, one.number))

    def container(self, service: str, number: int = 1) -> Container:
        """One container of a service."""
        for container in self.containers(service):
            if container.number == number:
                return container
        there = ", ".join(container.name for container in self.containers()) or "none"
        raise StackError(f"{self.project} has no container {service}-{number}; there are: {there}")

    def _explained(self, error: StackError) -> StackError:
        """The error of Compose's, with the troubles of the containers that are behind it."""
        containers = self.containers()
        ill = troubles_of(containers, may_have_finished=True)
        return Unhealthy(f"{error}\n{report(ill, len(containers))}") if ill else error


def _texts(values: Mapping[str, object] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (values or {}).items()}
