"""Whole runs as a user starts them, and how fast they were once they were under way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rookery.run_directory import read_progress

WARM_SHARE = 0.25  # of the steps, not counted: starting, filling the buffers
TIMEOUT_S = 600.0


class Run(NamedTuple):
    """A run's speed over its counted part."""

    epochs_per_s: float
    updates_per_s: float  # of one agent
    updates_per_step: float


def train_run(path: Path, agent_steps: int, flags: list[str]) -> Run:
    """`rookery train` for so many steps."""
    command = [sys.executable, "-m", "rookery.cli", "train", "--run-dir", str(path)]
    command += ["--agent-steps", str(agent_steps), "--set", "run.eval_episodes=0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return _speed(path)


def _speed(path: Path) -> Run:
    lines = read_progress(path / "params" / "progress.jsonl")
    summary = json.loads((path / "summary.json").read_text())
    total = sum(line["agent_steps"] for line in lines)
    steps = epochs = 0
    start_s: float | None = None
    for line in lines:
        steps += line["agent_steps"]
        if start_s is None:
            start_s = line["t"] if steps >= WARM_SHARE * total else None
        else:
            epochs += line["epochs"]
    assert start_s is not None
    epochs_per_s = epochs / (lines[-1]["t"] - start_s)
    agents = summary["agents"].values()
    updates_per_step = sum(agent["updates"] for agent in agents) / total
    steps_per_epoch = total / sum(line["epochs"] for line in lines)
    updates_per_s = epochs_per_s * steps_per_epoch * updates_per_step / len(agents)
    return Run(epochs_per_s, updates_per_s, updates_per_step)
