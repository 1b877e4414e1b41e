"""The whole story of one run."""

import numpy as np
import pytest
from conftest import MakeRun
from local_run import PATIENCE_S, assert_journal_equals_ring, service_named
from waiting import wait_for

from rookery.client import RunClient
from shared.messages import RunStatus

pytestmark = pytest.mark.integration


def versions_in_use(status: RunStatus) -> dict[str, int]:
    metrics = service_named(status, "actor-0").metrics
    return {agent: int(metrics[f"version.{agent}"]) for agent in status.agents}


def test_transition_becomes_weight_that_actor_uses(make_run: MakeRun) -> None:
    """A step is stored byte for byte, drawn, learned from, and the actor acts with the version it led to."""
    run = make_run()
    launcher = run.train()
    run.wait_until_training()

    def acts_with_trained_weights() -> dict[str, int] | None:
        status = run.status()
        used = versions_in_use(status) if status else {}
        return used if used and all(version > 1 for version in used.values()) else None

    used = wait_for(acts_with_trained_weights, "the actor uses a version after the first")
    drawn = run.replay_stats().buffers
    assert all(buffer.sampled_steps >= 32 for buffer in drawn.values())
    run.wait_for_progress(run.wait_until_training(), "steps are played with these versions")

    with RunClient(run.config()) as client:
        assert client.control("drain").state == "draining"
    assert launcher.wait(PATIENCE_S) == 0, run.output()
    assert not run.processes()
    assert "did not end in time" not in run.output(), "a service had to be killed at the end"

    summary = run.summary()
    assert summary["interrupted"] is False
    assert summary["restarts"] == {}
    stored = assert_journal_equals_ring(run)
    for agent, ring in stored.rings.items():
        valid = ring.valid_slots()
        versions = np.concatenate([ring.slot_arrays(slot)["version"] for slot in valid])
        assert versions.max() >= used[agent], "no stored step was chosen by the version in use"
        assert versions.max() <= summary["agents"][agent]["version"]
        assert summary["agents"][agent]["updates"] > 0
    ledger = summary["ledger"]
    assert ledger["produced"] == ledger["stored"] == stored.steps == summary["agent_steps"]
    assert ledger["lost"] == ledger["stored_twice"] == ledger["in_flight"] == ledger["abandoned"] == 0
