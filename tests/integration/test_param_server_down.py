"""The parameter server is gone for longer than a lease lasts."""

import json
import time

import pytest
from conftest import MakeRun
from local_run import LEASE_S, LocalRun, Peer, end
from waiting import wait_for

from shared.messages import ReplayStats, ReplayStatsRequest

pytestmark = pytest.mark.integration


def test_param_server_down_and_back_changes_no_lease_and_loses_no_version(make_run: MakeRun) -> None:
    """Actors and learners go on without it; afterwards versions continue and a spare learner still waits."""
    run = make_run(world__agents=1)
    services = run.start_all(learners=2)
    before = run.wait_until_training()
    holder = before.agents["agent_0"].learner
    spare = next(name for name in services if name.startswith("learner") and name != holder)
    wait_for(lambda: waits_for_a_lease(run, spare), "the spare learner waits")
    before = run.wait_until_training()
    with Peer(run.config()) as peer:
        services["param_server"].kill()
        services["param_server"].wait(10)
        watch_training_without(peer, 3 * LEASE_S)
    services["param_server"] = run.start("param_server")
    back = wait_for(run.status, "the parameter server answers")
    assert back.run_id == before.run_id
    assert back.agents["agent_0"].version >= before.agents["agent_0"].version
    assert back.agent_steps >= before.agent_steps

    since = time.monotonic()
    run.wait_for_progress(run.wait_until_training(), "weights are published and steps reported again")
    wait_for(lambda: time.monotonic() - since > 2 * LEASE_S, "any lease that was not renewed has lapsed")
    after = run.wait_until_training()
    assert after.agents["agent_0"].learner == holder
    assert after.agents["agent_0"].token == before.agents["agent_0"].token == 1
    assert [lease["number"] for lease in leases(run) if lease["role"] == "learner"] == [1]
    assert "learning" not in run.events(spare)
    end(services.pop("actor"), "actor")
    ledger = run.ledger()
    assert ledger.lost == ledger.stored_twice == ledger.in_flight == ledger.abandoned == 0
    run.end_by_hand(services)


def test_replay_that_ends_without_a_param_server_ends_well(make_run: MakeRun) -> None:
    """Its last words wait for an answer that does not come; meanwhile it is time to write to disk again."""
    run = make_run(world__agents=1, replay__sync_s=0.05)
    services = run.start_all(learners=1)
    run.wait_until_training()
    services["param_server"].kill()
    services["param_server"].wait(10)
    end(services["replay"], "replay")


def waits_for_a_lease(run: LocalRun, instance: str) -> bool:
    status = run.status()
    waits = {own.instance: own.waiting_for for own in status.services} if status else {}
    return waits.get(instance) == "a lease as learner"


def watch_training_without(peer: Peer, seconds: float) -> None:
    """Half a lease after another, more steps are inserted and more are drawn."""
    requests = peer.config.endpoints.replay[0].requests

    def counts() -> tuple[int, int]:
        stats = peer.ask(ReplayStatsRequest(), requests)
        assert isinstance(stats, ReplayStats)
        return stats.buffers["agent_0"].inserted_steps, stats.buffers["agent_0"].sampled_steps

    started = time.monotonic()
    while time.monotonic() - started < seconds:
        since, inserted, sampled = time.monotonic(), *counts()

        def goes_on(since: float = since, inserted: int = inserted, sampled: int = sampled) -> bool:
            now = counts()
            return time.monotonic() - since > LEASE_S / 2 and now[0] > inserted and now[1] > sampled

        wait_for(goes_on, "actors play and learners learn without the parameter server")


def leases(run: LocalRun) -> list[dict]:
    return json.loads((run.path / "params" / "leases.json").read_text())["leases"]
