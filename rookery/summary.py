"""What is left of a run at its end: summary.json and the picture of the learning curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rookery.launcher import Ending
from rookery.run_directory import RunDirectory, read_progress
from rookery.view import agent_label
from shared.config import Config

END_SHARE = 0.1  # first_return and last_return are means over this share of the epochs


def write_summary(
    run: RunDirectory, config: Config, ending: Ending, eval_returns: dict[str, float | None]
) -> dict[str, Any]:
    """Writes summary.json and returns it."""
    status, progress = ending.status, read_progress(run.progress_path)
    elapsed_s = max(status.elapsed_s, 1e-9)
    agents = {}
    for agent, own in status.agents.items():
        first, last = end_returns(progress, agent)
        agents[agent] = {
            "algorithm": config.algorithm_of(agent),
            "updates": own.updates,
            "updates_per_s": round(own.updates / elapsed_s, 2),
            "version": own.version,
            "first_return": first,
            "last_return": last,
            "eval_return": eval_returns.get(agent),
        }
    summary = {
        "seed": config.seed,
        "world": config.world.name,
        "interrupted": ending.interrupted,
        "wall_s": round(ending.wall_s, 2),
        "elapsed_s": round(status.elapsed_s, 2),
        "env_steps": status.env_steps,
        "agent_steps": status.agent_steps,
        "epochs": status.epochs,
        "agent_steps_per_s": round(status.agent_steps / elapsed_s, 1),
        "agents": agents,
        "ledger": ending.ledger,
        "restarts": ending.restarts,
    }
    run.summary_path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def end_returns(progress: list[dict[str, Any]], agent: str) -> tuple[float | None, float | None]:
    """Mean return over the first and the last 10% of the epochs, to the nearest report."""
    played = [(line["epochs"], line["return_sums"].get(agent, 0.0)) for line in progress if line["epochs"]]
    wanted = END_SHARE * sum(epochs for epochs, _sum in played)
    return _mean_until(played, wanted), _mean_until(played[::-1], wanted)


def _mean_until(played: list[tuple[int, float]], wanted: float) -> float | None:
    epochs, total = 0, 0.0
    for count, return_sum in played:
        epochs, total = epochs + count, total + return_sum
        if epochs >= wanted:
            break
    return round(total / epochs, 2) if epochs else None


def draw_curves(run: RunDirectory, target: Path) -> bool:
    """Return over time for each agent, as a PNG. False: nothing was played yet."""
    import matplotlib as mpl  # noqa: PLC0415 - half a second that other commands need not spend

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    progress = read_progress(run.progress_path)
    config = run.config()
    curves = {agent_label(config, agent): _curve(progress, agent) for agent in run.agents()}
    if not any(len(times) for times, _means in curves.values()):
        return False
    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for label, (times, means) in curves.items():
        axes.plot(times, means, label=label, linewidth=1.5)
    axes.set_xlabel("training time [s]")
    axes.set_ylabel("return per epoch, exploration included")
    axes.set_title(run.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return True


def _curve(progress: list[dict[str, Any]], agent: str, points: int = 120) -> tuple[list[float], list[float]]:
    """Times and mean returns, reports joined so that there are at most about `points` of them."""
    lines = sorted((line for line in progress if line["epochs"]), key=lambda line: line["t"])
    size = max(1, len(lines) // points)
    times, means = [], []
    for start in range(0, len(lines), size):
        part = lines[start : start + size]
        times.append(part[-1]["t"])
        means.append(
            sum(line["return_sums"].get(agent, 0.0) for line in part) / sum(line["epochs"] for line in part)
        )
    return times, means
