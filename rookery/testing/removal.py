"""What a project has on the engine, and how all of it is removed, also after owners that died.

Everything goes through the engine's own interface: it needs no compose file, and works for any project.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import docker
from docker.errors import APIError, NotFound

from rookery.testing.compose import OWNER_LABEL
from rookery.testing.errors import StackError, told_by_the_engine
from rookery.testing.owner import Owner
from shared.logs import get_logger

log = get_logger()

PROJECT_LABEL = "com.docker.compose.project"
REMOVE_S = 60.0
AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that exists on the engine."""

    name: str  # with its kind: "container rookery-1f2e-actor-1"
    remove: Callable[[], None]


def leftovers(client: docker.DockerClient, project: str) -> list[Leftover]:
    """Everything of a project, in an order in which it can be removed."""
    mine = {"label": f"{PROJECT_LABEL}={project}"}
    found = [
        Leftover(f"container {container.name}", partial(container.remove, force=True, v=True))
        for container in client.containers.list(all=True, filters=mine, ignore_removed=True)
    ]
    found += [
        Leftover(f"network {network.name}", network.remove) for network in client.networks.list(filters=mine)
    ]
    found += [
        Leftover(f"volume {volume.name}", volume.remove) for volume in client.volumes.list(filters=mine)
    ]
    # Images that have no name in the compose file are named after the project by Compose.
    for image in client.images.list(filters={"reference": f"{project}-*"}):
        found += [Leftover(f"image {tag}", partial(client.images.remove, tag)) for tag in image.tags]
    return found


def remove_everything(client: docker.DockerClient, project: str, deadline_s: float = REMOVE_S) -> None:
    """Removes a project until nothing is found of it any more."""
    deadline = time.monotonic() + deadline_s
    with told_by_the_engine(f"removing {project}"):
        while found := leftovers(client, project):
            refused = [reason for thing in found if (reason := _refusal(thing))]
            if time.monotonic() > deadline:
                raise StackError(
                    f"could not remove all of {project} in {deadline_s:.0f} s: {'; '.join(refused)}"
                )
            if refused:
                time.sleep(AGAIN_S)


def _refusal(thing: Leftover) -> str | None:
    """Removes it; why that was not possible now, for example because somebody else is removing it too."""
    try:
        thing.remove()
    except NotFound:
        return None
    except APIError as error:
        return f"{thing.name}: {error.explanation}"
    return None


def sweep(client: docker.DockerClient) -> list[str]:
    """Removes the projects whose owners died on this host without doing so; returns their names."""
    ours = {"label": [OWNER_LABEL, PROJECT_LABEL]}
    with told_by_the_engine("looking for what dead owners left"):
        labels = [
            container.labels
            for container in client.containers.list(all=True, filters=ours, ignore_removed=True)
        ]
        labels += [network.attrs["Labels"] for network in client.networks.list(filters=ours)]
        labels += [volume.attrs["Labels"] for volume in client.volumes.list(filters=ours)]
    owners = {found[PROJECT_LABEL]: Owner.from_label(found[OWNER_LABEL]) for found in labels}
    dead = sorted(project for project, owner in owners.items() if owner is not None and owner.is_dead)
    for project in dead:
        log.warning("removing a stack whose owner died", project=project)
        remove_everything(client, project)
    return dead
