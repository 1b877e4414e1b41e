"""Each service in turn is killed, paused for half a minute and cut off from the network.

What does not need it goes on, everything recovers by itself, every step is accounted for, and no agent's
version goes back (every look at the run checks that).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from real_run import COMPOSE_FILE, DEBUG_FILE, RECOVERY_S, START_S, RealRun, untouched
from waiting import wait_for

from rookery.testing.container import Container
from rookery.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

PAUSE_S = 30.0
CUT_S = 20.0
AGENTS = ("agent_0", "agent_1")


@pytest.fixture
def run(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object], tmp_path: Path
) -> RealRun:
    """Two agents, two learners, two actors, training."""
    stack = rookery_stack(
        [COMPOSE_FILE, DEBUG_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": len(AGENTS)},
        environment=small_run,
        scale={"actor": 2},
        deadline_s=START_S,
    )
    run = RealRun(stack, tmp_path)
    run.wait_for_progress("the run trains")
    return run


@contextmanager
def without(container: Container, fault: str) -> Iterator[None]:
    """The container is not to be reached inside the block, and at least for the fault's time."""
    absence: AbstractContextManager[None] = (
        container.paused(PAUSE_S) if fault == "paused" else container.partitioned()
    )
    started = time.monotonic()
    with absence:
        yield
        if fault == "cut off":
            time.sleep(max(0.0, started + CUT_S - time.monotonic()))  # how long the fault lasts


def assert_recovered(run: RealRun, container: Container, fault: str) -> None:
    """All agents learn and all is played on, beyond what was reached by now; the ledger is balanced."""
    container.wait_healthy(RECOVERY_S)
    since = run.wait_until(lambda _status: True, f"the run answers after {container} was {fault}")
    run.wait_for_progress(f"the run recovers after {container} was {fault}", since)
    run.assert_balanced()


def kill(run: RealRun, container: Container) -> None:
    """kill -9 of one: Docker starts it again, and nothing else."""
    others = [each for each in run.stack.containers() if each.id != container.id]
    restarts, before = container.restarts, untouched(others)
    container.kill()
    wait_for(lambda: container.restarts == restarts + 1, f"{container} is started again")
    assert_recovered(run, container, "killed")
    assert untouched(others) == before


def test_parameter_server_away(run: RealRun) -> None:
    """Actors play and learners train on without it; replay goes on storing and serving."""
    params = run.param_server
    kill(run, params)
    for fault in ("paused", "cut off"):
        with run.replay_alone() as sums, without(params, fault):
            for _ in range(3):  # on and on
                before = sums()
                wait_for(
                    lambda before=before: all(now > then for now, then in zip(sums(), before, strict=True)),
                    f"training goes on while the parameter server is {fault}",
                )
        assert_recovered(run, params, fault)


def test_replay_away(run: RealRun) -> None:
    """Actors wait and say for whom; nothing that they have played is lost."""
    replay = run.replay
    kill(run, replay)
    for fault in ("paused", "cut off"):
        with without(replay, fault):
            run.wait_until(
                lambda status: all(
                    "replay to acknowledge" in each.waiting_for
                    for each in status.services
                    if each.service == "actor"
                ),
                f"actors say that they wait for replay while it is {fault}",
            )
        assert_recovered(run, replay, fault)


def test_learner_away(run: RealRun) -> None:
    """The other agent learns on, and actors play on for both."""
    learner = run.of_agent("agent_0")
    kill(run, learner)
    for fault in ("paused", "cut off"):
        learner = run.of_agent("agent_0")
        with without(learner, fault):
            since = run.wait_until(
                lambda status: not status.agents["agent_0"].learner, f"the lease lapses while it is {fault}"
            )
            run.wait_for_progress(f"agent_1 learns on while agent_0's learner is {fault}", since, "agent_1")
        assert_recovered(run, learner, fault)


def test_actor_away(run: RealRun) -> None:
    """The other actor plays on, and both agents learn."""
    actor = run.stack.container("actor")
    kill(run, actor)
    for fault in ("paused", "cut off"):
        with without(actor, fault):
            since = run.wait_until(
                lambda status: (
                    sum(each.service == "actor" for each in status.services) == 1
                    or any(each.seen_s > 5.0 for each in status.services if each.service == "actor")
                ),
                f"one actor is gone while it is {fault}",
            )
            run.wait_for_progress(f"training goes on while one actor is {fault}", since)
        assert_recovered(run, actor, fault)


def test_woken_learner_cannot_do_anything(run: RealRun) -> None:
    """It slept past its lease, a spare one took its agent; it is refused everywhere and stands by."""
    run.stack.scale(START_S, learner=3)
    old = run.of_agent("agent_0")
    token = run.status().agents["agent_0"].token
    with old.paused():
        taken = run.wait_until(
            lambda status: status.agents["agent_0"].token > token and status.agents["agent_0"].learner,
            "the spare learner takes agent_0",
        )
        run.wait_for_progress("the new learner learns", taken, "agent_0")
    wait_for(lambda: old.restarts == 1, "the woken learner ends, and is started again")
    assert "StaleToken" in old.logs()
    old.wait_healthy(RECOVERY_S)
    assert "waiting for a lease as learner" in old.exec("python", "-m", "shared.health")
    now = run.status()
    assert now.agents["agent_0"].learner == taken.agents["agent_0"].learner
    refused = now.counters.get("refused.stale_token", 0) + run.stats().counters.get("refused.stale_token", 0)
    assert refused >= 1
    run.wait_for_progress("the new learner goes on", now)
    run.assert_balanced()
