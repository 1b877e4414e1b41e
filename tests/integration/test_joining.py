"""Actors join and leave while the run goes on."""

import json

import pytest
from conftest import MakeRun
from local_run import START_S, LocalRun, Peer, assert_journal_equals_ring, end, service_named
from waiting import wait_for

from shared.messages import LeaseRequest, Release

pytestmark = pytest.mark.integration


def test_actor_joining_late_has_newest_weights_and_leaves_nothing_behind(make_run: MakeRun) -> None:
    """Its weights can only come from snapshots; it leaves its index free and all that it played stored."""
    run = make_run(world__agents=1)
    services = run.start_all(learners=1)
    run.wait_until_training()
    end(services.pop("learner-0"), "learner-0")  # from now on there is no broadcast to catch
    status = run.status()
    assert status is not None
    versions = {agent: own.version for agent, own in status.agents.items()}
    assert min(versions.values()) > 1

    services["actor-late"] = run.start("actor", "actor-late")
    wait_for(lambda: is_ready(run, "actor-late"), "the late actor plays", START_S)
    wait_for(lambda: versions_of(run, "actor-late") == versions, "it has the newest weights", 5.0)
    late = service_named(run.wait_until_training(), "actor-late")
    assert late.holds == "index 1"
    reported = run.wait_until_training().agent_steps
    wait_for(lambda: (now := run.status()) and now.agent_steps > reported + 1000, "both play")

    end(services.pop("actor-late"), "actor-late")
    assert lease_of(run, "1") == ("", False)
    with Peer(run.config()) as peer:
        params = run.config().endpoints.params
        request = LeaseRequest(role="actor", instance="another", incarnation=peer.incarnation)
        assert peer.ask(request, params).index == 1
        peer.ask(Release(instance="another"), params)
    end(services.pop("actor"), "actor")
    ledger = run.ledger()
    assert ledger.in_flight == ledger.abandoned == ledger.lost == ledger.stored_twice == 0
    assert ledger.produced == ledger.stored
    run.end_by_hand(services)
    stored = assert_journal_equals_ring(run)
    assert {incarnation for incarnation, _agent in stored.streams} >= {late.incarnation}


def is_ready(run: LocalRun, instance: str) -> bool:
    status = run.status()
    return status is not None and any(own.instance == instance and own.ready for own in status.services)


def versions_of(run: LocalRun, instance: str) -> dict[str, int]:
    """The versions that an actor says it plays with."""
    status = run.status()
    metrics = service_named(status, instance).metrics if status else {}
    return {
        name.removeprefix("version."): int(version)
        for name, version in metrics.items()
        if name.startswith("version.")
    }


def lease_of(run: LocalRun, index: str) -> tuple[str, bool]:
    leases = json.loads((run.path / "params" / "leases.json").read_text())["leases"]
    own = next(lease for lease in leases if lease["role"] == "actor" and lease["name"] == index)
    return own["incarnation"], own["live"]
