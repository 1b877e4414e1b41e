"""kill -9 at any moment: the rest goes on, the dead one comes back, and no step is lost or stored twice."""

import signal
import subprocess
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

from services.actor.service import REPORT_S
from shared.messages import RunStatus

pytestmark = pytest.mark.integration

WINDOW = 3000  # segments
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


def test_replay_asleep_then_killed_with_thousands_queued_stores_each_once(make_run: MakeRun) -> None:
    """What a sleeping replay has in its queues is not sent again; what died in them is, in order."""
    run = make_run(
        world__agents=1, actor__segment_steps=1, actor__window_segments=WINDOW, replay__capacity_steps=200_000
    )
    services = run.start_all(learners=0)
    wait_for(lambda: (now := run.status()) and now.agent_steps > 1000, "steps are played", START_S)

    stop_until_window_is_full(run, services["replay"])
    services["replay"].send_signal(signal.SIGCONT)
    plays_on(run)
    assert actor_figure(run, "resent_segments") == 0

    stop_until_window_is_full(run, services["replay"])
    services["replay"].kill()
    services["replay"].wait(10)
    services["replay"] = run.start("replay")
    wait_for(lambda: actor_figure(run, "resent_segments") > 100, "the queues' contents come again")
    plays_on(run)

    end(services.pop("actor"), "actor")
    ledger = run.ledger()
    assert ledger.lost == ledger.stored_twice == ledger.in_flight == ledger.abandoned == 0
    assert ledger.produced == ledger.stored
    run.end_by_hand(services)
    assert assert_journal_equals_ring(run).steps == ledger.stored


def stop_until_window_is_full(run: LocalRun, replay: subprocess.Popen[bytes]) -> None:
    """SIGSTOP until the actor waits, and long enough for it to have asked twice how far its streams are."""
    replay.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_for(lambda: actor_figure(run, "unacknowledged_segments") >= WINDOW, "the window is full")
    wait_for(lambda: time.monotonic() - stopped_at > 3 * REPORT_S, "two reports are on their way")
    assert service_named(run.wait_until_known(), "actor").waiting_for.startswith("replay")


def plays_on(run: LocalRun) -> None:
    steps = run.wait_until_known().agent_steps
    wait_for(
        lambda: run.wait_until_known().agent_steps > steps + WINDOW + 500, "more than a window is played"
    )


def actor_figure(run: LocalRun, name: str) -> float:
    return service_named(run.wait_until_known(), "actor").metrics[name]


def test_launcher_killed_leaves_no_service_behind(make_run: MakeRun) -> None:
    """The services notice that their launcher is gone, however it went, and end."""
    run = make_run(world__agents=1)
    launcher = run.train()
    wait_for(
        lambda: (status := run.status()) and len([own for own in status.services if own.ready]) == 4,
        "all services are ready",
        START_S,
    )
    assert len(run.service_processes()) == 4
    launcher.kill()
    launcher.wait(10)
    wait_for(lambda: not run.processes(), "all services are gone", 8.0)
