"""What an engine that runs containers relies on: health from the service itself, and services that stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MakeRun
from local_run import START_S, LocalRun, end
from waiting import wait_for

from rookery.client import RunClient

pytestmark = pytest.mark.integration


def start(run: LocalRun, service: str, instance: str = "") -> subprocess.Popen[bytes]:
    """A service with a health socket of its own."""
    return run.start(service, instance, "--set", f"run.health_socket={socket_of(run, instance or service)}")


def socket_of(run: LocalRun, instance: str) -> Path:
    return run.path / f"{instance}.sock"


def health(run: LocalRun, instance: str) -> tuple[bool, str]:
    check = [sys.executable, "-m", "shared.health", str(socket_of(run, instance))]
    done = subprocess.run(check, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode == 0, done.stdout.strip()


def wait_for_health(run: LocalRun, instance: str, healthy: bool, words: str) -> None:
    wait_for(
        lambda: (said := health(run, instance))[0] == healthy and words in said[1],
        f"{instance} says {words!r}; it says {health(run, instance)}",
        START_S,
    )


def test_every_service_says_what_it_waits_for_until_it_is_ready(make_run: MakeRun) -> None:
    run = make_run(world__agents=1)
    replay = start(run, "replay")
    learner = start(run, "learner")
    wait_for_health(run, "replay", False, "waiting for the parameter server")
    wait_for_health(run, "learner", False, "waiting for the parameter server")
    params = start(run, "param_server")
    wait_for_health(run, "param_server", True, "ready; the run is running")
    wait_for_health(run, "replay", False, "waiting for an actor to register the agents' specs")
    actor = start(run, "actor")
    for instance in ("actor", "replay", "learner"):
        wait_for_health(run, instance, True, "ready")
    spare = start(run, "learner", "spare")
    wait_for_health(run, "spare", True, "waiting for a lease as learner")  # as it should be
    for popen in (actor, spare, learner, replay, params):
        end(popen)


def test_services_that_stay_wait_for_a_finished_run_to_be_resumed(make_run: MakeRun) -> None:
    """An engine starts them again whenever they end; they must not leave and come back in circles."""
    run = make_run(world__agents=1, run__stay=True)
    services = run.start_all(learners=1)
    run.wait_until_training()
    with RunClient(run.config()) as client:
        client.control("drain")
        wait_for(lambda: client.status().state == "finished", "the run is finished")
    for name in ("actor", "learner-0"):
        assert services[name].wait(15) == 0
    services["actor"] = start(run, "actor")
    services["learner-0"] = start(run, "learner", "learner-0")
    for instance in ("actor", "learner-0"):
        wait_for_health(run, instance, True, "waiting for the run, which is finished, to be resumed")
    before = run.status()
    assert before is not None
    run.command("resume", str(run.path))
    run.wait_for_progress(before, "it goes on")
    run.end_by_hand(services)


def test_service_that_stays_ends_when_it_is_told_to(make_run: MakeRun) -> None:
    run = make_run(world__agents=1, run__stay=True)
    params = start(run, "param_server")
    run.wait_until_known()
    with RunClient(run.config()) as client:
        client.control("drain")
        wait_for(lambda: client.status().state == "finished", "the run is finished")
    actor = start(run, "actor")
    wait_for_health(run, "actor", True, "which is finished")
    end(actor, timeout_s=5)
    end(params)


def test_ledger_of_a_running_run_balances(make_run: MakeRun) -> None:
    run = make_run(world__agents=1)
    services = run.start_all(learners=1)
    run.wait_until_training()
    lines = dict(line.rsplit(maxsplit=1) for line in run.command("ledger", str(run.path)).splitlines())
    counts = {name: int(value.replace(",", "")) for name, value in lines.items()}
    assert counts["lost"] == counts["stored_twice"] == counts["abandoned"] == 0
    assert counts["produced"] == counts["stored"] + counts["in_flight"]
    assert counts["stored"] > 0
    run.end_by_hand(services)
