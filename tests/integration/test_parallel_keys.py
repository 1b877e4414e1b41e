"""Every key of `parallel:` does what it says, shown by what a run does."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import MakeRun
from local_run import LEASE_S, LocalRun, StoredRows, settings_of
from safetensors.numpy import load_file
from waiting import wait_for

from rookery.run_directory import RunDirectory, create_run
from rookery.sequential import SequentialRun
from rookery.view import View
from services.actor.policies import group_agents
from services.actor.rounds import RoundPlayer
from shared.algorithms import build_network
from shared.config import Config, load_config
from shared.schedule import Schedule

pytestmark = pytest.mark.integration

SMALL: dict[str, Any] = {
    "seed": 3,
    "run__minutes": None,
    "run__eval_episodes": 0,
    "world__agents": 2,
    "world__max_turns": 10,
    "actor__envs": 4,
    "replay__capacity_steps": 20_000,
    "replay__min_steps": 80,
    "replay__samples_per_insert": 1,
    "learner__batch_size": 16,
    "learner__network": {"hidden": [8]},
    "param_server__keep_versions": 1_000,
    "parallel__enabled": False,
}


@pytest.fixture(autouse=True)
def _users_module_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the services, as a user would do it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def timed(directory: Path, agents: int = 2) -> dict[str, Any]:
    """Settings with which every agent writes its updates to a file of its own."""
    options = {f"agent_{n}": {"options": {"log": str(directory / f"agent_{n}.times")}} for n in range(agents)}
    return {"learner__algorithm": "timed_dqn:TimedDQN", "agents": options}


def times(directory: Path) -> dict[str, list[tuple[float, float, str]]]:
    """What they wrote: start, end and thread of each update, by agent."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for path in sorted(directory.glob("*.times")):
        lines = (line.split() for line in path.read_text().splitlines())
        found[path.stem] = [(float(start), float(end), thread) for start, end, thread in lines]
    return found


def all_have_trained(directory: Path, updates: int) -> bool:
    written = times(directory)
    return len(written) == 2 and all(len(each) > updates for each in written.values())


def overlaps(written: dict[str, list[tuple[float, float, str]]]) -> int:
    """How many updates began before the one before them, of whichever agent, had ended."""
    spans = sorted((start, end) for updates in written.values() for start, end, _thread in updates)
    return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def pauses(written: dict[str, list[tuple[float, float, str]]], longer_than_s: float) -> int:
    """How often nobody trained for so long."""
    starts = sorted(start for updates in written.values() for start, _end, _thread in updates)
    return sum(later - earlier > longer_than_s for earlier, later in itertools.pairwise(starts))


def sequential(path: Path, steps: int, **settings: Any) -> RunDirectory:
    """A whole sequential run, in this process."""
    config = load_config(None, settings_of(SMALL | {"run__agent_steps": steps} | settings), {})
    run, config = create_run(config, path)
    SequentialRun(run, config, View(config, live=False)).launch(resume=False)
    return run


def weights(run: RunDirectory) -> dict[str, bytes]:
    return {
        f"{path.parent.name}/{path.stem}/{name}": tensor.tobytes()
        for path in sorted((run.path / "params" / "agents").glob("*/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def updates_by_version(run: RunDirectory, agent: str) -> list[int]:
    kept = sorted((run.path / "params" / "agents" / agent).glob("*.safetensors"))
    return [run.weights(agent, int(path.stem)).updates for path in kept]


def versions_by_round(stored: StoredRows, config: Config) -> dict[int, set[int]]:
    """With which versions the stored steps of each round were played."""
    found: dict[int, set[int]] = {}
    for ring in stored.rings.values():
        for slot in ring.valid_slots().tolist():
            number = int(ring.metadata[slot]["epoch"]) // (config.actor.count * config.actor.envs)
            found.setdefault(number, set()).update(ring.slot_arrays(slot)["version"].tolist())
    return found


# --- enabled ----------------------------------------------------------------------------------------------


def test_enabled_false_is_one_process_without_sockets_that_status_knows(make_run: MakeRun) -> None:
    """No service is started; Ctrl-C ends it between two rounds, and `rookery status` tells what it is."""
    run = make_run(parallel__enabled=False)
    launcher = run.train("--agent-steps", "10000000")
    progress = run.path / "params" / "progress.jsonl"
    wait_for(lambda: progress.exists() and progress.stat().st_size > 1_000, "it plays", 60)
    process = psutil.Process(launcher.pid)
    assert not process.children()
    assert not process.net_connections("inet")
    assert not run.service_processes()
    said = json.loads(run.command("status", "--json", str(run.path)))
    assert (said["state"], said["mode"], said["pid"]) == ("running", "sequential", str(launcher.pid))
    assert said["epochs"] > 0
    summary = run.interrupt(launcher, timeout_s=30)
    assert json.loads((run.path / "manifest.json").read_text())["agent_steps"] == summary["agent_steps"]
    assert "is not running" in run.command("status", str(run.path))


# --- async_learning, parallel_training, num_workers -------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "at_once"),
    [
        ({"parallel_training": False}, False),
        ({"num_workers": 1, "async_learning": False}, False),
        ({}, True),
    ],
    ids=["parallel_training_false", "num_workers_1_in_lockstep", "all_at_once"],
)
def test_agents_train_at_the_same_time_unless_they_are_not_to(
    make_run: MakeRun, tmp_path: Path, settings: dict[str, Any], at_once: bool
) -> None:
    """One at a time, no two updates overlap, and all agents train; else some overlap.

    Actors are held close to the learners: one that kept its turn while it waits for batches would wait for
    actors that wait for the other learner, until replay takes that one for dead, again and again.
    """
    parallel = {f"parallel__{key}": value for key, value in settings.items()}
    run = make_run(replay__tolerance=0, actor__window_segments=4, **timed(tmp_path), **parallel)
    launcher = run.train()
    wait_for(lambda: all_have_trained(tmp_path, 150), "both agents train", 60)
    run.interrupt(launcher, timeout_s=30)
    written = times(tmp_path)
    assert (overlaps(written) > 0) == at_once
    assert pauses(written, LEASE_S / 2) <= 2
    _check_async_learning(run, settings.get("async_learning", True))


def _check_async_learning(run: LocalRun, is_async: bool) -> None:
    """false: rounds, each played with the version that the schedule says; true: as versions come."""
    config = run.config()
    schedule, played = Schedule.of(config), versions_by_round(run.stored(), config)
    assert len(played) > 10
    in_schedule = all(versions == {schedule.version_for(n)} for n, versions in played.items())
    assert in_schedule != is_async
    assert (run.path / "manifest.json").exists() != is_async


def test_num_workers_bounds_the_threads_of_one_process(tmp_path: Path) -> None:
    """Three agents, two at a time."""
    settings = {"world__agents": 3, "parallel__use_threads": True, "parallel__num_workers": 2}
    sequential(tmp_path / "run", 2_400, **timed(tmp_path, 3), **settings)
    written = times(tmp_path)
    threads = {thread for updates in written.values() for _start, _end, thread in updates}
    assert threads == {"train_0", "train_1"}
    spans = [(start, end) for updates in written.values() for start, end, _thread in updates]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 2


# --- use_threads ------------------------------------------------------------------------------------------


def test_use_threads_trains_agents_side_by_side_to_the_same_weights(tmp_path: Path) -> None:
    """Each agent's phase in a thread of its own; without, one after another in the main thread."""
    runs, written = {}, {}
    for use in (False, True):
        times_of = tmp_path / f"times-{use}"
        times_of.mkdir()
        settings = timed(times_of) | {"parallel__use_threads": use}
        runs[use] = sequential(tmp_path / f"run-{use}", 3_200, **settings)
        written[use] = times(times_of)
    assert {thread for each in written[False].values() for *_span, thread in each} == {"MainThread"}
    assert overlaps(written[False]) == 0
    assert {thread for each in written[True].values() for *_span, thread in each} == {"train_0", "train_1"}
    assert overlaps(written[True]) > 10
    assert len(written[True]["agent_0"]) > 50
    assert weights(runs[True]) == weights(runs[False])


# --- train_interval ---------------------------------------------------------------------------------------


def test_train_interval_in_async_draws_in_bursts(make_run: MakeRun) -> None:
    """Samples stand still between multiples of the interval, and never come from one that is not full."""
    interval_steps, minimum = 40 * 50, 200
    run = make_run(parallel__train_interval=40, replay__min_steps=minimum)
    launcher = run.train()
    run.wait_until_training()
    drawn_to_the_end: set[int] = set()

    def has_seen_bursts() -> bool:
        for buffer in run.replay_stats().buffers.values():
            full, open_steps = divmod(buffer.inserted_steps - minimum, interval_steps)
            left = buffer.limiter.ahead_samples - open_steps  # of what full intervals have paid for
            assert left >= 0
            if left < 32:  # not enough for a batch: it waits for the next interval
                drawn_to_the_end.add(full)
        return len(drawn_to_the_end) >= 3

    wait_for(has_seen_bursts, "three bursts that were drawn to their end", 30, every_s=0.02)
    run.interrupt(launcher)


@pytest.mark.parametrize("interval", [1, 24])
def test_train_interval_in_rounds_trains_in_bursts(tmp_path: Path, interval: int) -> None:
    """A round is 4 epochs: with 24, every sixth phase trains and the others publish what there is."""
    run = sequential(tmp_path / "run", 80 * 26, parallel__train_interval=interval)
    updates = updates_by_version(run, "agent_0")
    trained = [later > earlier for earlier, later in itertools.pairwise(updates)]
    assert len(trained) == 26
    assert updates[-1] == (240 * 4 if interval > 1 else 24 * 40) // 16
    if interval == 1:
        assert all(trained[2:])
    else:  # the buffer is filled after two rounds
        assert [number for number, each in enumerate(trained) if each] == [7, 13, 19, 25]


# --- lag_rounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_lag_rounds_says_which_version_plays_a_round(tmp_path: Path, lag: int) -> None:
    """0: the newest; 1: the one before, so that playing need not wait for training."""
    run = sequential(tmp_path / "run", 800, parallel__lag_rounds=lag)
    (run.replay / "service-0.json").write_text(
        json.dumps({"run": "", "specs": json.loads((run.path / "params" / "specs.json").read_text())})
    )
    played = versions_by_round(StoredRows(run.replay, run.config()), run.config())
    assert played == {number: {max(1, number + 1 - lag)} for number in range(10)}


# --- parallel_actions -------------------------------------------------------------------------------------


def test_parallel_actions_batches_agents_of_one_shape_to_the_same_actions() -> None:
    """One pass for all, or one for each agent: what is chosen does not change."""
    rounds, groups = {}, {}
    for together in (True, False):
        settings = SMALL | {"world__agents": 3, "parallel__parallel_actions": together}
        config = load_config(None, settings_of(settings | {"actor__epsilon": {"start": 0.1}}), {})
        player = RoundPlayer(config, 0)
        groups[together] = [group.agents for group in group_agents(config, player.specs, 4)]
        for place, (agent, spec) in enumerate(player.specs.items()):
            state = build_network(spec, config.learner_for(agent)).state_dict()
            rng = np.random.default_rng(place)
            tensors = {name: rng.normal(size=t.shape).astype(np.float32) for name, t in state.items()}
            player.load(agent, 1, tensors)
        rounds[together] = player.play(0)[0]
    assert groups[True] == [("agent_0", "agent_1", "agent_2")]
    assert groups[False] == [("agent_0",), ("agent_1",), ("agent_2",)]
    for agent, cuts in rounds[True].items():
        for one, other in zip(cuts, rounds[False][agent], strict=True):
            np.testing.assert_array_equal(one.arrays["action"], other.arrays["action"])
            np.testing.assert_array_equal(one.arrays["observation"], other.arrays["observation"])
