"""A run that is interrupted, continued, paused and resumed."""

import time

import numpy as np
import psutil
import pytest
import torch
from conftest import MakeRun
from local_run import LocalRun, StoredRows, assert_journal_equals_ring, service_named
from waiting import wait_for

from rookery.run_directory import RunDirectory
from services.replay.records import incarnation_words
from shared.messages import RunStatus
from shared.networks import QNetwork, flat_input

pytestmark = pytest.mark.integration

DECAY_STEPS = 6_000
INTERRUPTED_S = 8.0  # 5 s where nothing else runs
IDLE_SHARE = 0.03
SETTLED_S = 1.5  # several heartbeats


def test_interrupted_run_resumed_continues_where_it_stopped(make_run: MakeRun) -> None:
    """Counters, versions, updates, exploration and stored rows all go on from their old values."""
    run = make_run(
        world__agents=1,
        actor__epsilon__decay_steps=DECAY_STEPS,
        actor__epsilon__base=0.02,
        actor__epsilon__spread=0,
        param_server__keep_versions=100_000,
    )
    launcher = run.train()
    run.wait_until_training()
    wait_for(lambda: (now := run.status()) and now.agent_steps > 1.1 * DECAY_STEPS, "epsilon has decayed")
    interrupted_at = time.monotonic()
    first = run.interrupt(launcher)
    assert time.monotonic() - interrupted_at < INTERRUPTED_S
    assert first["interrupted"] is True
    old_journal = run.journal()

    launcher = run.train("--resume", str(run.path), "--minutes", "5")
    status = wait_for(lambda: goes_beyond(run, first), "everything goes on above its old value", 60)
    incarnation = service_named(status, "actor-0").incarnation
    second = run.interrupt(launcher)
    assert second["ledger"]["lost"] == second["ledger"]["stored_twice"] == 0
    assert second["elapsed_s"] > first["elapsed_s"]
    opened = [line["steps"] for line in run.log("replay-0") if line["event"] == "buffer open"]
    assert sum(opened) == first["ledger"]["stored"], "the resumed replay did not find all old rows"
    stored = assert_journal_equals_ring(run)
    assert all(len(stored.streams[key]) == len(lines) for key, lines in old_journal.items())
    for agent in stored.specs:
        assert exploring_share(run, stored, agent, incarnation) < 0.15


def goes_beyond(run: LocalRun, old: dict) -> RunStatus | None:
    """The status, if the resumed run is past what the summary of the first part says."""
    now = run.trains()
    if now is None:
        return None
    for counter in ("env_steps", "agent_steps", "epochs"):
        assert getattr(now, counter) >= old[counter], f"{counter} went back"
    for agent, own in now.agents.items():
        assert own.version >= old["agents"][agent]["version"]
    actor = [own for own in now.services if own.service == "actor"]
    beyond = (
        actor
        and now.env_steps > old["env_steps"]
        and now.agent_steps > old["agent_steps"] + 1000
        and now.epochs > old["epochs"]
        and all(own.updates > old["agents"][agent]["updates"] for agent, own in now.agents.items())
        and all(own.version > old["agents"][agent]["version"] for agent, own in now.agents.items())
    )
    return now if beyond else None


def exploring_share(run: LocalRun, stored: StoredRows, agent: str, incarnation: str) -> float:
    """How many of an actor's first actions with weights were not the greedy ones of their version."""
    ring, spec = stored.rings[agent], stored.specs[agent]
    valid = ring.valid_slots()
    records = ring.metadata[valid]
    mine = (records["incarnation"] == incarnation_words(incarnation)).all(axis=1)
    by_sequence = valid[mine][np.argsort(records["sequence"][mine])]
    networks: dict[int, QNetwork] = {}
    greedy = played = 0
    for slot in by_sequence:
        rows = ring.slot_arrays(slot)
        before, owned = int(ring.metadata["before"][slot]), int(ring.metadata["owned"][slot])
        for row in range(before, before + owned):
            version = int(rows["version"][row])
            if version == 0:
                continue  # no weights yet: it acts at random and says so
            if version not in networks:
                networks[version] = network_of(run, stored, agent, version)
            stack = np.zeros((spec.stack, *spec.observation.shape), spec.observation.dtype.numpy)
            frames = rows["observation"][max(0, row + 1 - spec.stack) : row + 1]
            stack[len(stack) - len(frames) :] = frames
            values = networks[version](flat_input(torch.from_numpy(stack[None]), spec))
            greedy += int(values.argmax()) == int(rows["action"][row])
            played += 1
        if played >= 200:
            break
    assert played >= 200
    return 1 - greedy / played


def network_of(run: LocalRun, stored: StoredRows, agent: str, version: int) -> QNetwork:
    network = QNetwork(stored.specs[agent], run.config().learner_for(agent).network)
    tensors = RunDirectory(run.path).weights(agent, version).tensors
    network.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()})
    return network


def test_paused_run_idles_until_it_is_resumed(make_run: MakeRun) -> None:
    """Nothing is played or trained, no service uses the processor, and `resume` lets it go on."""
    run = make_run(world__agents=1)
    launcher = run.train()
    run.wait_until_training()
    assert "paused" in run.command("pause", str(run.path))
    before = settled(run)
    shares = busy_shares(run, 3.0)
    after = run.status()
    assert after is not None
    assert after.state == "paused"
    assert figures(after) == figures(before)
    assert after.elapsed_s == before.elapsed_s
    assert {name: share for name, share in shares.items() if share >= IDLE_SHARE} == {}
    assert len(shares) == 4

    assert "running" in run.command("resume", str(run.path))
    run.wait_for_progress(after, "training goes on")
    run.interrupt(launcher)


def figures(status: RunStatus) -> tuple[int, dict[str, tuple[int, int]]]:
    return status.agent_steps, {name: (own.version, own.updates) for name, own in status.agents.items()}


def settled(run: LocalRun) -> RunStatus:
    """The status after the last of what was on its way when the run was paused has arrived."""
    last, since = run.wait_until_training(), time.monotonic()

    def stands_still() -> bool:
        nonlocal last, since
        now = run.wait_until_training()
        if figures(now) != figures(last):
            last, since = now, time.monotonic()
        return time.monotonic() - since > SETTLED_S

    wait_for(stands_still, "the counters stand still")
    return last


def busy_shares(run: LocalRun, seconds: float) -> dict[str, float]:
    """The share of a core that each service used over this time."""
    services = run.service_processes()
    before = {name: used_s(process) for name, process in services.items()}
    started = time.monotonic()
    time.sleep(seconds)  # the measurement itself
    elapsed_s = time.monotonic() - started
    return {name: (used_s(process) - before[name]) / elapsed_s for name, process in services.items()}


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
