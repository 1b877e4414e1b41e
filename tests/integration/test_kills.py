"""kill -9 at any moment: the rest goes on, the dead one comes back, and no step is lost or stored twice."""

import signal
import time

import pytest
from conftest import MakeRun
from local_run import (
    START_S,
    LocalRun,
    assert_journal_equals_ring,
    end,
    service_named,
    wait_for,
)

from shared.messages import RunStatus

pytestmark = pytest.mark.integration

BACK_S = 20.0  # usually 2 to 6 s; on two busy cores the import of torch alone can take 8 s


def ready_again(run: LocalRun, instance: str, old_pid: int) -> RunStatus | None:
    """The status, once another process has taken the instance's place."""
    status = run.status()
    mine = [own for own in status.services if own.instance == instance] if status else []
    return status if any(own.ready and own.pid != old_pid for own in mine) else None


def kill_and_wait_until_all_learn(run: LocalRun, instance: str) -> None:
    before = run.wait_until_training()
    pid, killed_at = run.kill(instance), time.monotonic()
    back = wait_for(lambda: ready_again(run, instance, pid), f"{instance} is back", BACK_S)
    run.wait_for_progress(before, f"all agents are further than before {instance} died")
    run.wait_for_progress(back, f"all agents learn since {instance} is back")
    assert time.monotonic() - killed_at < BACK_S


def test_train_services_killed_in_turn_goes_on_and_loses_nothing(make_run: MakeRun) -> None:
    """Replay, parameter server, learner and actor die in turn; afterwards journals and rings agree."""
    run = make_run()
    launcher = run.train()
    status = run.wait_until_training()
    killed_actor = service_named(status, "actor-0").incarnation
    for victim in ("replay-0", "param_server", status.agents["agent_1"].learner, "actor-0"):
        kill_and_wait_until_all_learn(run, victim)
    run.wait_for_progress(run.wait_until_training(), "training goes on after all of it")

    summary = run.interrupt(launcher)
    assert set(summary["restarts"].values()) == {1}
    assert len(summary["restarts"]) == 4
    ledger = summary["ledger"]
    assert ledger["lost"] == ledger["stored_twice"] == ledger["in_flight"] == 0
    assert ledger["produced"] == ledger["stored"] + ledger["abandoned"]
    stored = assert_journal_equals_ring(run, killed=[killed_actor])
    assert stored.steps == ledger["stored"]


def test_replay_killed_with_thousands_of_segments_queued_stores_each_once(make_run: MakeRun) -> None:
    """What lay in the queues of a dead replay is sent again, in order, and nothing of it is stored twice."""
    run = make_run(
        world__agents=1, actor__segment_steps=1, actor__window_segments=5000, replay__capacity_steps=200_000
    )
    services = run.start_all(learners=0)

    def unacknowledged() -> float:
        status = run.status()
        actors = [own for own in status.services if own.service == "actor"] if status else []
        return actors[0].metrics.get("unacknowledged_segments", 0.0) if actors else 0.0

    wait_for(lambda: (status := run.status()) and status.agent_steps > 1000, "steps are played", START_S)
    services["replay"].send_signal(signal.SIGSTOP)
    wait_for(lambda: unacknowledged() >= 5000, "the window is full of segments that nobody reads")
    stuck = run.status()
    assert stuck is not None
    assert service_named(stuck, "actor").waiting_for.startswith("replay")
    services["replay"].kill()
    services["replay"].wait(10)

    services["replay"] = run.start("replay")
    caught_up = stuck.agent_steps + 3000
    wait_for(lambda: (status := run.status()) and status.agent_steps > caught_up, "the actor plays again")
    status = run.status()
    assert status is not None
    assert service_named(status, "actor").metrics["resent_segments"] > 100
    end(services.pop("actor"), "actor")
    ledger = run.ledger()
    assert ledger.lost == ledger.stored_twice == ledger.in_flight == ledger.abandoned == 0
    assert ledger.produced == ledger.stored
    run.end_by_hand(services)
    assert assert_journal_equals_ring(run).steps == ledger.stored


def test_launcher_killed_leaves_no_service_behind(make_run: MakeRun) -> None:
    """The services notice that their launcher is gone, however it went, and end."""
    run = make_run()
    launcher = run.train()
    wait_for(
        lambda: (status := run.status()) and len([own for own in status.services if own.ready]) == 5,
        "all services are ready",
        START_S,
    )
    assert len(run.service_processes()) == 5
    launcher.kill()
    launcher.wait(10)
    wait_for(lambda: not run.processes(), "all services are gone", 8.0)
