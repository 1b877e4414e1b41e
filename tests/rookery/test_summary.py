from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.launcher import Ending
from rookery.run_directory import RunDirectory, create_run
from rookery.summary import draw_curves, end_returns, write_summary
from shared.config import Config, load_config
from shared.messages import AgentStatus, RunStatus


def line(epochs: int, mean: float, t: float = 0.0, agent: str = "agent_0") -> dict[str, Any]:
    return {
        "t": t,
        "actor": 0,
        "incarnation": "a" * 32,
        "number": 1,
        "epochs": epochs,
        "env_steps": 50 * epochs,
        "agent_steps": 50 * epochs,
        "return_sums": {agent: mean * epochs},
    }


def make_run(path: Path, lines: list[dict[str, Any]]) -> tuple[RunDirectory, Config]:
    run, config = create_run(load_config(None, ["seed=4"], {}), path)
    run.progress_path.parent.mkdir()
    run.progress_path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    (run.path / "params" / "specs.json").write_text('{"agent_0": {}}')
    return run, config


def make_ending(**changes: Any) -> Ending:
    status = RunStatus(
        state="finished",
        run_id="r",
        elapsed_s=changes.pop("elapsed_s", 10.0),
        epochs=20,
        env_steps=1_000,
        agent_steps=3_000,
        services=(),
        agents={"agent_0": AgentStatus(version=7, updates=500, token=1, learner="x", recent_return=2.0)},
        counters={},
    )
    fields: dict[str, Any] = {
        "status": status,
        "ledger": {"produced": 3_000, "lost": 0},
        "interrupted": False,
        "wall_s": 12.345,
        "restarts": {"actor-0": 1},
    }
    return Ending(**(fields | changes))


def test_end_returns_are_means_over_the_first_and_last_tenth() -> None:
    """Of 100 epochs the first 10 and the last 10 count, weighted by how many epochs a report has."""
    progress = [line(4, 1.0), line(6, 2.0), *(line(10, 50.0) for _ in range(8)), line(5, 9.0), line(5, 11.0)]
    assert end_returns(progress, "agent_0") == (1.6, 10.0)


def test_end_returns_with_large_reports_take_whole_reports() -> None:
    """A report cannot be split: the nearest number of whole ones is taken."""
    assert end_returns([line(100, 3.0), line(100, 5.0)], "agent_0") == (3.0, 5.0)


def test_end_returns_of_a_single_report_are_equal() -> None:
    """The first and the last tenth are the same then."""
    assert end_returns([line(7, -2.5)], "agent_0") == (-2.5, -2.5)


@pytest.mark.parametrize("progress", [[], [line(0, 0.0)], [line(0, 0.0), line(0, 0.0)]])
def test_end_returns_of_nothing_are_none(progress: list[dict[str, Any]]) -> None:
    """Without a finished epoch there is no mean."""
    assert end_returns(progress, "agent_0") == (None, None)


def test_end_returns_skip_reports_without_an_epoch() -> None:
    """A report in the middle of an epoch has steps and no return."""
    assert end_returns([line(0, 0.0), line(5, 1.0), line(0, 0.0)], "agent_0") == (1.0, 1.0)


def test_end_returns_of_an_agent_that_never_appears_are_zero() -> None:
    """A return sum that was left out counts as nothing earned."""
    assert end_returns([line(5, 1.0)], "stranger") == (0.0, 0.0)


def test_written_summary_has_the_run_in_figures(tmp_path: Path) -> None:
    """What is returned is what is in the file."""
    run, config = make_run(tmp_path, [line(10, 1.0), line(10, 3.0)])
    summary = write_summary(run, config, make_ending(), {"agent_0": 5.5})
    assert json.loads(run.summary_path.read_text()) == summary
    assert summary["agents"]["agent_0"] == {
        "algorithm": "dqn",
        "updates": 500,
        "updates_per_s": 50.0,
        "version": 7,
        "first_return": 1.0,
        "last_return": 3.0,
        "eval_return": 5.5,
    }
    assert (summary["seed"], summary["agent_steps_per_s"], summary["wall_s"]) == (4, 300.0, 12.35)
    assert summary["ledger"] == {"produced": 3_000, "lost": 0}
    assert summary["restarts"] == {"actor-0": 1}


def test_summary_of_an_interrupted_run_without_progress_is_written_all_the_same(tmp_path: Path) -> None:
    """No time, no epochs, no evaluation: no division by zero, and nothing invented."""
    run, config = make_run(tmp_path, [])
    summary = write_summary(run, config, make_ending(interrupted=True, elapsed_s=0.0, ledger={}), {})
    own = summary["agents"]["agent_0"]
    assert summary["interrupted"]
    assert (own["first_return"], own["last_return"], own["eval_return"]) == (None, None, None)


def test_curves_of_a_run_with_progress_are_drawn(tmp_path: Path) -> None:
    """The picture is a PNG, however many reports there are."""
    run, _config = make_run(tmp_path, [line(2, float(number), t=float(number)) for number in range(300)])
    target = tmp_path / "plots" / "deeper" / "curve.png"
    assert draw_curves(run, target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_curves_of_a_run_without_progress_are_not_drawn(tmp_path: Path) -> None:
    """An empty picture would say less than none."""
    run, _config = make_run(tmp_path, [line(0, 0.0)])
    assert not draw_curves(run, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
