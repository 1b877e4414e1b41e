"""Runs in rounds: as processes or in one, whole or in pieces, the weights are the same bit for bit."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from conftest import MakeRun
from local_run import LocalRun
from safetensors.numpy import load_file
from waiting import wait_for

pytestmark = pytest.mark.integration

STEPS = 12_000
ROUNDS: dict[str, Any] = {
    "seed": 3,
    "actor__journal": False,
    "replay__capacity_steps": 3_000,  # the ring goes round: what is overwritten must be the same as well
    "param_server__keep_versions": 1_000,
}

UNLEARNED = {"agent_1": {"algorithm": "scripted"}, "agent_2": {"algorithm": "random"}}


def train(run: LocalRun, *flags: str) -> dict[str, Any]:
    """Trains to the end; returns the summary."""
    launcher = run.train(*flags)
    assert launcher.wait(120) == 0, run.output()
    assert not run.processes()
    summary = run.summary()
    assert summary["ledger"]["produced"] == summary["ledger"]["stored"]
    assert summary["ledger"]["lost"] == summary["ledger"]["stored_twice"] == 0
    return summary


def weights(run: LocalRun) -> dict[str, str]:
    """Every version of every agent: the sha256 of each of its tensors."""
    digests = {}
    for path in sorted((run.path / "params" / "agents").glob("*/*.safetensors")):
        for name, tensor in load_file(path).items():
            digests[f"{path.parent.name}/{path.stem}/{name}"] = hashlib.sha256(tensor.tobytes()).hexdigest()
    assert len(digests) > 20, "too few versions to compare"
    return digests


def returns(run: LocalRun) -> dict[tuple[int, str], float]:
    """What each actor and agent got, summed over all epochs."""
    sums: Counter[tuple[int, str]] = Counter()
    for line in (run.path / "params" / "progress.jsonl").read_text().splitlines():
        played = json.loads(line)
        for agent, total in played["return_sums"].items():
            sums[played["actor"], agent] += total
    return dict(sums)


def assert_same_run(one: LocalRun, other: LocalRun) -> None:
    assert weights(one) == weights(other)
    assert returns(one) == returns(other)


@pytest.mark.parametrize(
    ("actors", "settings"),
    [
        (1, {"learner__algorithm": "dqn"}),
        (2, {"learner__algorithm": "dqn", "parallel__lag_rounds": 0, "parallel__train_interval": 20}),
        (4, {"learner__algorithm": "dqn", "parallel__num_workers": 1}),
        (1, {"learner__algorithm": "iqn", "learner__network": {"hidden": [32], "noisy": True}}),
        (2, {"learner__algorithm": "iqn", "replay__services": 2}),
        (4, {"learner__algorithm": "iqn", "learner__micro_batches": 2}),
        (2, {"world__agents": 4, "agents": UNLEARNED}),
    ],
    ids=["dqn-1", "dqn-2", "dqn-4", "iqn-1", "iqn-2", "iqn-4", "unlearned-2"],
)
def test_lockstep_run_has_the_weights_of_the_sequential_run(
    make_run: MakeRun, actors: int, settings: dict[str, Any]
) -> None:
    """Every version of every agent and all returns, for one actor process and for several."""
    sequential, lockstep = (make_run(**ROUNDS, actor__count=actors, **settings) for _ in range(2))
    steps = ("--agent-steps", str(STEPS))
    one = train(sequential, "--mode", "sequential", *steps)
    other = train(lockstep, "--mode", "lockstep", *steps)
    assert_same_run(sequential, lockstep)
    for name in ("epochs", "agent_steps", "env_steps"):
        assert one[name] == other[name]
    learned = [agent["updates"] for agent in other["agents"].values() if agent["version"]]
    assert len(learned) == 2
    assert all(updates > 50 for updates in learned)
    assert (
        STEPS <= one["agent_steps"] < STEPS + actors * 4 * 50 * len(learned)
    )  # whole rounds of those that learn


def test_other_seed_has_other_weights(make_run: MakeRun) -> None:
    """The comparison above can fail."""
    runs = [make_run(**ROUNDS | {"seed": seed}) for seed in (3, 4)]
    for run in runs:
        train(run, "--mode", "sequential", "--agent-steps", "4000")
    assert weights(runs[0]) != weights(runs[1])
    assert returns(runs[0]) != returns(runs[1])


def test_lockstep_run_stopped_and_resumed_equals_the_uninterrupted_one(make_run: MakeRun) -> None:
    """Ctrl-C in the middle, a resume as processes, another as one process: the same weights at the end."""
    whole, parts = make_run(**ROUNDS, actor__count=2), make_run(**ROUNDS, actor__count=2)
    steps = 60_000
    train(whole, "--mode", "sequential", "--agent-steps", str(steps))
    launcher = parts.train("--mode", "lockstep", "--agent-steps", str(steps))
    parts.wait_until_training()
    first = parts.interrupt(launcher, timeout_s=30)
    assert 0 < first["agent_steps"] < steps
    manifest = json.loads((parts.path / "manifest.json").read_text())
    assert manifest["agent_steps"] == first["agent_steps"]
    assert {part["rounds"] + 1 for part in manifest["agents"].values()} == {
        agent["version"] for agent in first["agents"].values()
    }

    between = first["agent_steps"] + 8_000
    train(parts, "--resume", str(parts.path), "--agent-steps", str(between))
    train(parts, "--resume", str(parts.path), "--mode", "sequential", "--agent-steps", str(steps))
    assert_same_run(whole, parts)


def test_lockstep_run_whose_service_is_killed_comes_to_the_same_weights(make_run: MakeRun) -> None:
    """kill -9 of replay and later of a learner: it goes back to its last manifest and plays again."""
    whole, killed = make_run(**ROUNDS), make_run(**ROUNDS, run__manifest_minutes=0.05)
    launcher = killed.train("--mode", "lockstep", "--agent-steps", "100000000")
    killed.wait_until_training()
    killed.versions.clear()  # it goes back on purpose
    killed.kill("replay-0")
    wait_for(lambda: "replay-0 killed by signal 9" in killed.output(), "the launcher noticed")
    wait_for((killed.path / "manifest").exists, "a copy to go back to", 60)
    wait_for(lambda: len(killed.service_processes()) == 5, "everything runs again", 60)
    killed.kill("learner-0")
    wait_for(lambda: "learner-0 killed by signal 9" in killed.output(), "the launcher noticed")
    killed.versions.clear()
    killed.wait_for_progress(killed.wait_until_training(), "it trains again", 60)
    summary = killed.interrupt(launcher, timeout_s=60)
    assert summary["restarts"] == {"replay-0": 1, "learner-0": 1}
    train(whole, "--mode", "sequential", "--agent-steps", str(summary["agent_steps"]))
    assert_same_run(whole, killed)


def test_resume_of_files_that_changed_is_refused_with_their_name(make_run: MakeRun) -> None:
    """A manifest proves every file that it stands for."""
    run = make_run(**ROUNDS)
    train(run, "--mode", "sequential", "--agent-steps", "3000")
    priorities = run.path / "replay" / "agent_1" / "priorities"
    data = bytearray(priorities.read_bytes())
    data[9] ^= 1
    priorities.write_bytes(data)
    launcher = run.train("--resume", str(run.path), "--agent-steps", "6000")
    assert launcher.wait(60) == 2
    assert "agent_1: replay_xxh3" in run.output()


def test_sequential_run_takes_a_breakpoint(make_run: MakeRun) -> None:
    """A debugger in the algorithm reads from the terminal and goes on: everything is one process."""
    run = make_run(**ROUNDS, world__agents=1)
    script = (
        "import services.learner.algorithms.dqn as dqn\n"
        "loss, stops = dqn.DQN.loss, []\n"
        "def stopping(self, batch):\n"
        "    if not stops:\n"
        "        stops.append(1)\n"
        "        breakpoint()\n"
        "    return loss(self, batch)\n"
        "dqn.DQN.loss = stopping\n"
        "from rookery.cli import main\n"
        "raise SystemExit(main())\n"
    )
    settings = [part for setting in run.settings for part in ("--set", setting)]
    flags = ["train", "--mode", "sequential", "--agent-steps", "3000", "--run-dir", str(run.path), *settings]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags],
        input="p batch['observation'].shape\nc\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "torch.Size([32, 625])" in done.stdout
    assert run.summary()["agents"]["agent_0"]["updates"] > 0
