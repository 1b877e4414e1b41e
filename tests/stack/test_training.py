"""The promise of the README: `docker compose up --scale actor=8` trains, and scales while it does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_run import COMPOSE_FILE, DEBUG_FILE, START_S, RealRun, untouched
from waiting import wait_for

from rookery.client import RunClient
from rookery.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

GOOD_RETURN = 140.0
TRAINING_S = 600.0


def statuses(stack: Stack) -> dict[str, object]:
    return json.loads(stack.container("param_server").exec("rookery", "status", "--json"))


def mean_return(stack: Stack) -> float:
    """What a person would type."""
    played = stack.run("actor", "rookery", "eval", "--episodes", "300", "--json")
    return float(json.loads(played)["mean_return"])


def test_eight_actors_train_and_scale_without_restarting_anything(
    rookery_stack: Callable[..., Stack], rookery_image: str
) -> None:
    started = time.monotonic()
    stack = rookery_stack(
        [COMPOSE_FILE], variables={"ROOKERY_IMAGE": rookery_image}, scale={"actor": 2}, deadline_s=START_S
    )
    others = [each for each in stack.containers() if each.service != "actor"]
    before = untouched(others)
    stack.scale(START_S, actor=8)
    assert len(stack.containers("actor")) == 8
    stack.scale(actor=1)
    assert len(stack.containers("actor")) == 1
    stack.scale(START_S, actor=8)
    assert untouched(others) == before

    while (reached := mean_return(stack)) < GOOD_RETURN:
        assert time.monotonic() - started < TRAINING_S, f"a mean return of {reached} in {TRAINING_S} s"
    assert untouched(others) == before
    assert {each.health for each in stack.containers() if each.service != "keys"} == {"healthy"}
    ledger = json.loads(stack.container("param_server").exec("rookery", "ledger", "--json"))
    assert ledger["lost"] == ledger["stored_twice"] == ledger["abandoned"] == 0, ledger  # seven left cleanly


def test_five_agents_have_five_learners_and_a_sixth_stands_by(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object]
) -> None:
    """`AGENTS=5 docker compose up --scale learner=6`; nobody sets an id."""
    stack = rookery_stack(
        [COMPOSE_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 5},
        environment=small_run,
        scale={"learner": 6},
        deadline_s=START_S,
    )
    status = statuses(stack)
    holders = {agent["learner"] for agent in status["agents"].values()}  # type: ignore[attr-defined]
    assert len(holders) == 5
    said = [each.exec("python", "-m", "shared.health") for each in stack.containers("learner")]
    assert sum("waiting for a lease as learner" in words for words in said) == 1
    published = [each for each in stack.containers() if each.look()["NetworkSettings"]["Ports"]]
    assert published == []


def test_down_leaves_nothing_and_up_goes_on(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object]
) -> None:
    """Every container ends within its grace and hands over what it has; the run is in its volume."""
    stack = rookery_stack(
        [COMPOSE_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 2},
        environment=small_run,
        scale={"actor": 2},
        deadline_s=START_S,
    )
    before = statuses(stack)
    for container in [*stack.containers("actor"), *stack.containers("learner"), *stack.containers("replay")]:
        started = time.monotonic()
        container.stop()
        assert time.monotonic() - started < 5.0, f"{container.name} took too long to end"
        assert container.look()["State"]["ExitCode"] == 0
    stack.down(volumes=False)
    left = stack.leftovers()
    assert sorted(name.split("_")[-1] for name in left) == ["keys", "run"], left
    stack.up(START_S)
    after = statuses(stack)
    assert after["run_id"] == before["run_id"]
    assert after["agent_steps"] >= before["agent_steps"]  # type: ignore[operator]
    for agent, then in before["agents"].items():  # type: ignore[attr-defined]
        now = after["agents"][agent]  # type: ignore[index]
        assert now["version"] > then["version"]
        assert now["updates"] >= then["updates"]
    ledger = json.loads(stack.container("param_server").exec("rookery", "ledger", "--json"))
    assert ledger["lost"] == ledger["stored_twice"] == ledger["abandoned"] == 0, ledger
    stack.down()
    assert stack.leftovers() == []


def test_run_that_is_over_stands_by_until_it_is_resumed(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object], tmp_path: Path
) -> None:
    """Docker starts again whatever ends; no container goes round in circles when a run is finished."""
    stack = rookery_stack(
        [COMPOSE_FILE, DEBUG_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 1},
        environment=small_run,
        deadline_s=START_S,
    )
    run = RealRun(stack, tmp_path)
    with RunClient(run.config()) as client:
        client.control("drain")
    run.wait_until(lambda status: status.state == "finished", "the run is finished")
    workers = [*stack.containers("actor"), *stack.containers("learner")]
    for worker in workers:
        wait_for(
            lambda worker=worker: worker.restarts == 1 and worker.health == "healthy", f"{worker} stands by"
        )
        said = worker.exec("python", "-m", "shared.health")
        assert said == "waiting for the run, which is finished, to be resumed\n"
    before = run.status()
    run.param_server.exec("rookery", "resume")
    run.wait_for_progress("the run goes on", before)
    assert [worker.restarts for worker in workers] == [1, 1]
