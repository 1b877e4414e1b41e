"""Agents spread over two replay services by a map in the config: each trains with its own."""

from __future__ import annotations

import json

import psutil
import pytest
from conftest import MakeRun
from local_run import LocalRun, assert_journal_equals_ring
from waiting import wait_for

pytestmark = pytest.mark.integration

WINDOW = 1000  # segments: the actor plays on for the living service's agents while the other one is dead
MEANWHILE = 50  # updates: more than what a learner may hold in batches that it already has


def test_agents_placed_on_two_replays_one_killed_the_others_train_on_and_nothing_is_lost(
    make_run: MakeRun,
) -> None:
    """Each service keeps the agents that the map gives it, dies for them alone, and comes back for them."""
    run = make_run(
        world__agents=3,
        replay__services=2,
        replay__placement={"agent_0": 1, "agent_1": 0},
        actor__window_segments=WINDOW,
    )
    path = str(run.path)
    launcher = run.train()
    run.wait_until_training()
    assert kept_agents(run) == [["agent_1", "agent_2"], ["agent_0"]]
    assert "snapshot 1: agent_1" in run.command("replay", path, "snapshot")
    taken = sorted(agent.name for agent in (run.path / "replay" / "snapshots" / "1").iterdir())
    assert taken == ["agent_0", "agent_1", "agent_2"]

    pid = run.kill("replay-1")
    successor = wait_for(lambda: other_process(run, "replay-1", pid), "replay-1 is started again")
    successor.suspend()  # as long as we look: it would be back before much could be seen
    wait_for(
        OnlyTheseTrain(run, ["agent_1", "agent_2"]), "the agents of replay-0 train on, that of replay-1 waits"
    )
    successor.resume()
    run.wait_for_progress(run.wait_until_known(), "all agents learn since replay-1 is back")
    ledger = assert_nothing_lost(run.interrupt(launcher)["ledger"])
    assert run.summary()["restarts"] == {"replay-1": 1}
    assert assert_journal_equals_ring(run).steps == ledger["stored"]

    moved = ("--set", "replay.services=3", "--set", "replay.placement.agent_0=2")
    launcher = run.train("--resume", path, "--minutes", "5", *moved)
    run.wait_for_progress(run.wait_until_known(), "all agents learn with three services")
    assert kept_agents(run) == [["agent_1", "agent_2"], [], ["agent_0"]]
    assert "snapshot 2: agent_1" in run.command("replay", path, "snapshot")
    assert assert_nothing_lost(run.interrupt(launcher)["ledger"])["stored"] > ledger["stored"]
    assert_journal_equals_ring(run)


class OnlyTheseTrain:
    """True once these agents have learned much while the others' updates stood still."""

    def __init__(self, run: LocalRun, agents: list[str]) -> None:
        self.run, self.agents = run, agents
        self.since = run.wait_until_known()

    def __call__(self) -> bool:
        now = self.run.wait_until_known()
        gained = {agent: now.agents[agent].updates - self.since.agents[agent].updates for agent in now.agents}
        if any(gained[agent] for agent in gained if agent not in self.agents):
            self.since = now  # they still had batches, or published only now what they had learned before
            return False
        return all(gained[agent] >= MEANWHILE for agent in self.agents)


def other_process(run: LocalRun, instance: str, old_pid: int) -> psutil.Process | None:
    process = run.service_processes().get(instance)
    return process if process is not None and process.pid != old_pid else None


def kept_agents(run: LocalRun) -> list[list[str]]:
    """By replay service, as `rookery replay RUN stats` has it."""
    stats = json.loads(run.command("replay", str(run.path), "stats", "--json"))
    return [sorted(each["buffers"]) for each in stats["replay"]]


def assert_nothing_lost(ledger: dict[str, int]) -> dict[str, int]:
    assert ledger["lost"] == ledger["stored_twice"] == ledger["in_flight"] == ledger["abandoned"] == 0
    assert ledger["produced"] == ledger["stored"]
    return ledger
