"""One container of a stack: looked at, disturbed in the ways that machines are, and asked."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import docker.models.containers
from docker.errors import NotFound

from rookery.testing.errors import CommandFailed, StackError, told_by_the_engine
from rookery.testing.health import HEALTHY_S, LOOK_S, check_of, wait_until_well

SERVICE_LABEL = "com.docker.compose.service"
NUMBER_LABEL = "com.docker.compose.container-number"
KILLED_S = 10.0


class Container:
    """A handle that stays valid over restarts; what it says is asked of the engine each time."""

    def __init__(self, found: docker.models.containers.Container) -> None:
        self._container = found
        self.id: str = found.id
        self.service: str = found.labels[SERVICE_LABEL]
        self.number = int(found.labels[NUMBER_LABEL])
        self.name = f"{self.service}-{self.number}"

    def __repr__(self) -> str:
        return f"<{self._container.name}>"

    # --- looking at it ------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """One of created, running, paused, restarting, exited, dead."""
        return str(self.look()["State"]["Status"])

    @property
    def health(self) -> str:
        """One of starting, healthy, unhealthy, or none: without a health check nobody knows."""
        return str(check_of(self.look()).get("Status", "none"))

    @property
    def restarts(self) -> int:
        """How often the restart policy started it again."""
        return int(self.look()["RestartCount"])

    @property
    def started_at(self) -> str:
        """When its present or last process started."""
        return str(self.look()["State"]["StartedAt"])

    def published(self, port: int, protocol: str = "tcp") -> tuple[str, int]:
        """Where the host reaches a published port. The engine chooses, so that stacks do not meet."""
        bound = self.look()["NetworkSettings"]["Ports"].get(f"{port}/{protocol}")
        if not bound:
            raise StackError(
                f"{self.name} does not publish {port}/{protocol}; add it to `ports:` of the service"
            )
        return bound[0]["HostIp"], int(bound[0]["HostPort"])

    def logs(self, since: float | None = None, tail: int | None = None) -> str:
        """What it wrote: since a time (of `time.time()`), or only the last lines; over all its restarts."""
        with told_by_the_engine(f"logs of {self.name}"):
            text: bytes = self._container.logs(since=since, tail="all" if tail is None else tail)
        return text.decode(errors="replace")

    def wait_healthy(self, deadline_s: float = HEALTHY_S) -> None:
        """Returns when it runs and is healthy, or raises Unhealthy."""
        wait_until_well(lambda: [self], deadline_s, may_have_finished=False)

    def look(self) -> dict[str, Any]:
        """All that the engine knows of it, as `docker inspect` prints it."""
        with told_by_the_engine(f"looking at {self.name}"):
            self._container.reload()
        attributes: dict[str, Any] = self._container.attrs
        return attributes

    # --- disturbing it ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL to all of its processes, as if the machine had done it; then its restart policy acts.

        `docker kill` would be taken for the user's decision, after which nothing is restarted. The init
        process cannot be killed from inside; it ends by itself when its child is gone, with the child's code.
        Returns when the engine has seen it end.
        """
        attributes = self.look()
        if not attributes["HostConfig"]["Init"]:
            raise StackError(f"kill() needs `init: true` for the service {self.service} in the compose file")
        ended_before = attributes["State"]["FinishedAt"]
        api = self._container.client.api
        with told_by_the_engine(f"killing {self.name}"):
            # Privileged: where capabilities are dropped, not even root may signal another user's processes.
            command = api.exec_create(self.id, ["sh", "-c", "kill -9 -1"], user="0", privileged=True)
            api.exec_start(command["Id"], detach=True)
        deadline = time.monotonic() + KILLED_S
        while self.look()["State"]["FinishedAt"] == ended_before:
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} still runs {KILLED_S:.0f} s after its processes were killed")
            time.sleep(LOOK_S)

    def stop(self, grace_s: int = 10) -> None:
        """SIGTERM, after the grace SIGKILL; it stays stopped until `start`."""
        with told_by_the_engine(f"stopping {self.name}"):
            self._container.stop(timeout=grace_s)

    def start(self) -> None:
        with told_by_the_engine(f"starting {self.name}"):
            self._container.start()

    def pause(self) -> None:
        """Freezes all its processes; connections stay open and silent."""
        with told_by_the_engine(f"pausing {self.name}"):
            self._container.pause()

    def unpause(self) -> None:
        with told_by_the_engine(f"unpausing {self.name}"):
            self._container.unpause()

    @contextmanager
    def paused(self, at_least_s: float = 0.0) -> Iterator[None]:
        """Paused inside the block, and at least this long: `with container.paused(3): pass` is 3 seconds."""
        self.pause()
        until = time.monotonic() + at_least_s
        try:
            yield
            time.sleep(max(0.0, until - time.monotonic()))
        finally:
            if self._exists() and self.status == "paused":
                self.unpause()

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """Cut off from every network inside the block; afterwards back under the same names.

        The engine may give it another address then, as it may after any restart.
        """
        endpoints: dict[str, dict[str, Any]] = self.look()["NetworkSettings"]["Networks"]
        cut: list[str] = []
        try:
            for network in endpoints:
                with told_by_the_engine(f"disconnecting {self.name} from {network}"):
                    self._container.client.networks.get(network).disconnect(self._container)
                cut.append(network)
            yield
        finally:
            for network in cut if self._exists() else ():
                self._connect(network, endpoints[network])

    def _connect(self, name: str, endpoint: dict[str, Any]) -> None:
        fixed = endpoint["IPAMConfig"] or {}
        with told_by_the_engine(f"connecting {self.name} to {name}"):
            self._container.client.networks.get(name).connect(
                self._container,
                aliases=endpoint["Aliases"],
                links=endpoint["Links"],
                ipv4_address=fixed.get("IPv4Address"),
                ipv6_address=fixed.get("IPv6Address"),
                driver_opt=endpoint["DriverOpts"],
            )

    def _exists(self) -> bool:
        """False if its stack was taken down in the meantime."""
        try:
            self._container.reload()
        except NotFound:
            return False
        return True

    # --- asking it ----------------------------------------------------------------------------------------

    def exec(self, *command: str) -> str:
        """What a command in the container writes to its standard output, or CommandFailed with all it wrote.

        One string is split as a shell would split it; several are the program and its arguments as they are.
        """
        words: Sequence[str] = shlex.split(command[0]) if len(command) == 1 else command
        with told_by_the_engine(f"running {words[0]} in {self.name}"):
            code, (output, errors) = self._container.exec_run(list(words), demux=True)
        text, complaint = (part.decode(errors="replace") if part else "" for part in (output, errors))
        if code:
            raise CommandFailed(shlex.join(words), self.name, code, text + complaint)
        return text
