"""What people do to runs in rounds: pause, change their mind, press Ctrl-C at any moment, bring worlds."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeRun
from local_run import LocalRun
from test_lockstep import ROUNDS, assert_same_run, train
from waiting import wait_for

pytestmark = pytest.mark.integration

STEPS = 40_000


def refused(run: LocalRun, *arguments: str) -> str:
    """What `rookery ...` says when it refuses."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run.command(*arguments)
    return str(caught.value.stderr)


def test_lockstep_run_paused_interrupted_and_resumed_comes_to_the_same_weights(make_run: MakeRun) -> None:
    """Paused in a round, ended while paused, resumed at its limit, interrupted while it starts, resumed."""
    whole, parts = make_run(**ROUNDS), make_run(**ROUNDS)
    train(whole, "--mode", "sequential", "--agent-steps", str(STEPS))
    launcher = parts.train("--mode", "lockstep", "--agent-steps", str(STEPS))
    parts.wait_until_training()
    assert "is paused" in parts.command("pause", str(parts.path))
    said = refused(parts, "replay", str(parts.path), "limiter", "--samples-per-insert", "2")
    assert "part of what is repeated bit for bit" in said
    assert "samples per insert" in parts.command("replay", str(parts.path), "limiter")
    first = parts.interrupt(launcher, timeout_s=30)
    assert 0 < first["agent_steps"] < STEPS
    assert (parts.path / "manifest.json").exists()

    at_its_limit = parts.train("--resume", str(parts.path), "--agent-steps", str(first["agent_steps"]))
    assert at_its_limit.wait(60) != 0
    assert "raise it first" in parts.output()

    starting = parts.train("--resume", str(parts.path), "--agent-steps", str(STEPS))
    wait_for(parts.service_processes, "it starts", 30)
    starting.send_signal(signal.SIGINT)
    assert starting.wait(60) in (0, 1)
    wait_for(lambda: not parts.processes(), "nothing is left behind")

    again = parts.train("--resume", str(parts.path), "--actors", "2")
    assert again.wait(60) == 2
    assert "actor.count = 2, the run was made with 1" in parts.output()
    train(parts, "--resume", str(parts.path), "--agent-steps", str(STEPS))
    assert_same_run(whole, parts)


def test_lockstep_run_ended_at_once_says_what_became_of_it(make_run: MakeRun) -> None:
    """Ctrl-C twice: without a copy to go back to it cannot be continued, and is told so."""
    run = make_run(**ROUNDS)
    launcher = run.train("--mode", "lockstep", "--agent-steps", "10000000")
    run.wait_until_training()
    assert "is paused" in run.command("pause", str(run.path))  # so that the first one does not end it
    launcher.send_signal(signal.SIGINT)
    wait_for(lambda: "ending after this round" in run.output(), "the first is heard")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 0
    assert not run.processes()
    said = run.output()
    if "in the middle of a round, before its first manifest" in said:
        assert not (run.path / "manifest.json").exists()
    else:  # it was faster
        assert (run.path / "manifest.json").exists()


def test_lockstep_run_of_a_world_with_short_lives_has_the_weights_of_the_sequential_run(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs end early and rounds in the middle of one; also run.minutes ends between two rounds."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "actor"), prepend=":")
    settings: dict[str, Any] = {
        **ROUNDS,
        "world__name": "short_lives:short_lives",
        "world__max_turns": 30,
        "actor__count": 2,
        "learner__n_step": 4,
        "replay__capacity_steps": 2_000,
        "run__eval_episodes": 4,
    }
    by_time, by_steps = make_run(**settings | {"run__minutes": 0.12}), make_run(**settings)
    assert by_time.train("--mode", "lockstep").wait(60) == 0, by_time.output()
    manifest = json.loads((by_time.path / "manifest.json").read_text())
    (rounds,) = {part["rounds"] for part in manifest["agents"].values()}
    summary = by_time.summary()
    assert rounds > 1
    assert summary["env_steps"] == rounds * 2 * 4 * 30
    assert summary["agent_steps"] < summary["env_steps"] * 2
    assert all(own["eval_return"] is not None for own in summary["agents"].values())
    one = train(by_steps, "--mode", "sequential", "--agent-steps", str(rounds * 2 * 4 * 30 * 2))
    assert one["agent_steps"] == summary["agent_steps"]
    assert_same_run(by_time, by_steps)
