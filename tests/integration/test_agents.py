"""Each agent in its own way: two learn with networks and settings of their own, one follows a script."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import MakeRun
from local_run import LocalRun, Peer, assert_journal_equals_ring, service_named
from waiting import wait_for

from rookery.client import RunClient
from rookery.run_directory import RunDirectory
from shared.errors import Refused
from shared.messages import LeaseRequest

pytestmark = pytest.mark.integration

FIRST = "iqn"  # agent_0's algorithm
AGENTS: dict[str, dict[str, Any]] = {
    "agent_0": {"algorithm": FIRST, "lr": 3e-4, "network": {"hidden": [24, 24]}, "batch_size": 48},
    "agent_2": {"algorithm": "scripted"},
}
STEPS = 10_000  # of the two that learn: 100 epochs


def test_agents_with_their_own_algorithms_train_in_one_run_beside_a_scripted_one(make_run: MakeRun) -> None:
    """The scripted one has no learner, no lease, no buffer and no weights; ledger, summary and eval hold."""
    run = make_run(world__agents=3, agents=AGENTS, replay__services=2, run__eval_episodes=100)
    launcher = run.train()
    status = run.wait_until_training()
    assert sorted(service.holds for service in status.services if service.service == "learner") == [
        "agent_0",
        "agent_1",
    ]
    assert "version.agent_2" not in service_named(status, "actor-0").metrics
    stats = json.loads(run.command("replay", str(run.path), "stats", "--json"))
    assert [list(each["buffers"]) for each in stats["replay"]] == [["agent_0"], ["agent_1"]]
    assert "agent_2 (scripted)" in run.command("status", str(run.path))
    with Peer(run.config()) as peer, pytest.raises(Refused, match="'agent_2' is scripted: it has no learner"):
        peer.ask(
            LeaseRequest(role="learner", instance="x", incarnation=peer.incarnation, agent="agent_2"),
            run.config().endpoints.params,
        )
    wait_for(lambda: (now := run.status()) and now.agent_steps > STEPS, "enough was played", 60)
    with RunClient(run.config()) as client:
        client.control("drain")
    assert launcher.wait(60) == 0, run.output()

    summary = run.summary()
    check_summary(summary)
    assert assert_journal_equals_ring(run).steps == summary["agent_steps"]
    assert not (run.path / "replay" / "agent_2").exists()
    assert not (run.path / "params" / "agents" / "agent_2").exists()
    assert not (run.path / "checkpoints" / "agent_2").exists()
    assert shapes_of_first_layer(run) == {"agent_0": 24, "agent_1": 32}
    check_eval(run)


def check_summary(summary: dict[str, Any]) -> None:
    ledger, agents = summary["ledger"], summary["agents"]
    assert summary["restarts"] == {}
    assert ledger["produced"] == ledger["stored"] == summary["agent_steps"] > STEPS
    assert ledger["lost"] == ledger["in_flight"] == ledger["abandoned"] == ledger["stored_twice"] == 0
    assert summary["agent_steps"] == 2 * summary["env_steps"]  # of the two that learn
    assert [own["algorithm"] for own in agents.values()] == [FIRST, "dqn", "scripted"]
    assert agents["agent_0"]["updates"] > 0
    assert agents["agent_1"]["version"] > 0
    assert (agents["agent_2"]["updates"], agents["agent_2"]["version"]) == (0, 0)
    # Walking to the nearest gem earns 162 beside two of its kind, and not less beside two that play worse.
    assert agents["agent_2"]["last_return"] > 140
    assert agents["agent_2"]["eval_return"] > 140


def shapes_of_first_layer(run: LocalRun) -> dict[str, int]:
    """The width of each learning agent's first layer, as published."""
    folder = RunDirectory(run.path)
    return {
        agent: folder.weights(agent).tensors["body.0.weight"].shape[0] for agent in folder.learning_agents()
    }


def check_eval(run: LocalRun) -> None:
    played = json.loads(run.command("eval", str(run.path), "--episodes", "100", "--json"))["agents"]
    assert played["agent_0"]["version"] > 0
    assert played["agent_2"]["version"] == 0
    assert played["agent_2"]["algorithm"] == "scripted"
    assert played["agent_2"]["eval_return"] > 140
    words = run.command("eval", str(run.path), "--episodes", "10").splitlines()
    assert words[2].startswith("agent_2")
    assert words[2].endswith("scripted")
