"""The real stack in containers: it comes up from nothing, and trains."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from waiting import wait_for

from rookery.testing.stack import Stack

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(1800),  # the image may have to be built first
]


def versions(stack: Stack) -> dict[str, int]:
    """The newest version of each agent's weights."""
    status = json.loads(stack.container("param_server").exec("rookery", "status", "--json"))
    return {name: agent["version"] for name, agent in status["agents"].items()}


def test_stack_of_two_actors_and_two_agents_trains(
    rookery_stack: Callable[..., Stack], rookery_image: str
) -> None:
    """All containers are healthy, and every agent's version rises, and rises again."""
    stack = rookery_stack(
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 2},
        scale={"actor": 2},
        environment={"ROOKERY_LEARNER__PUBLISH_S": 0.5, "ROOKERY_REPLAY__MIN_STEPS": 500},
        deadline_s=180,
    )
    running = [one.name for one in stack.containers() if one.health == "healthy"]
    assert running == ["actor-1", "actor-2", "learner-1", "learner-2", "param_server-1", "replay-1"]
    first = versions(stack)
    assert sorted(first) == ["agent_0", "agent_1"]
    for rise in (1, 2):
        wait_for(
            lambda rise=rise: all(new >= first[name] + rise for name, new in versions(stack).items()),
            f"every version has risen by {rise} from {first}",
        )
    assert {one.name: one.restarts for one in stack.containers()} == dict.fromkeys([*running, "keys-1"], 0)
