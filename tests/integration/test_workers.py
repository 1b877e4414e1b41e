"""A learner with several gradient workers, as a process."""

import pytest
from conftest import MakeRun
from local_run import PATIENCE_S, LocalRun, service_named
from waiting import wait_for

from services.learner.checkpoint import unpack
from shared.messages import RunStatus

pytestmark = pytest.mark.integration

WORKERS = {f"worker.{number}.contention" for number in range(3)}


def test_learner_with_workers_trains_publishes_and_goes_on_from_its_checkpoint(make_run: MakeRun) -> None:
    """Waits are reported; the last checkpoint counts every draw that was trained on, and no other."""
    run = make_run(world__agents=1, learner__workers=len(WORKERS))
    services = run.start_all(learners=1)
    run.wait_until_training()
    status = wait_for(lambda: has_trained(run, 100), "a hundred updates and their figures")
    metrics = service_named(status, "learner-0").metrics
    assert {"read_wait_ms", "write_wait_ms", "contention", "contention_alarms"} <= set(metrics)
    assert status.agents["agent_0"].version > 1
    run.end_by_hand(services)
    assert "left behind in an update" not in run.events("learner-0")

    tensors, counters = newest_checkpoint(run)
    updates, skipped, _copies = (int(value) for value in tensors["counters"])
    assert updates >= 100
    assert counters["next_draw"] == updates + skipped

    services = run.start_all(learners=1)
    status = wait_for(lambda: has_trained(run, updates + 10), "it goes on", PATIENCE_S * 2)
    run.end_by_hand(services)
    tensors, counters = newest_checkpoint(run)
    assert counters["next_draw"] == int(tensors["counters"][0]) + int(tensors["counters"][1]) > updates


def has_trained(run: LocalRun, updates: int) -> RunStatus | None:
    status = run.status()
    if status is None or "agent_0" not in status.agents or status.agents["agent_0"].updates < updates:
        return None
    metrics = service_named(status, "learner-0").metrics
    return status if set(metrics) >= WORKERS else None  # each says something once it has trained


def newest_checkpoint(run: LocalRun):
    paths = run.path.rglob("*.ckpt")
    newest = max(paths, key=lambda path: int(path.stem))
    _label, _newline, data = newest.read_bytes().partition(b"\n")
    return unpack(data)
