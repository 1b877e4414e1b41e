from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.param_server.run_state import PERSIST_EVERY_S, RunBook
from shared.errors import BrokenInvariant, Refused


def open_run(
    tmp_path: Path, now: float = 0.0, minutes: float | None = 1.0, agent_steps: int | None = None
) -> RunBook:
    return RunBook(tmp_path / "run.json", minutes=minutes, agent_steps=agent_steps, now=now)


def test_run_id_is_made_once_and_kept(tmp_path: Path) -> None:
    """A restart is the same run."""
    run = open_run(tmp_path)
    assert (len(run.run_id), run.state) == (32, "running")
    assert open_run(tmp_path).run_id == run.run_id
    assert open_run(tmp_path / "other").run_id != run.run_id


def test_run_through_its_whole_life_keeps_each_state_over_a_restart(tmp_path: Path) -> None:
    """running, paused, running, draining, finished, running."""
    steps = 0
    for change, state in [
        (lambda run: run.pause(1), "paused"),
        (lambda run: run.resume(1, steps), "running"),
        (lambda run: run.drain(1), "draining"),
        (lambda run: run.resume(1, steps), "running"),
        (lambda run: run.drain(1), "draining"),
        (lambda run: run.finish(1), "finished"),
        (lambda run: run.resume(1, steps), "running"),
    ]:
        run = open_run(tmp_path, 1)
        assert change(run)
        assert not change(run)
        assert open_run(tmp_path, 1).state == run.state == state


def test_run_asked_for_an_impossible_change_refuses_it(tmp_path: Path) -> None:
    """The reason names both states and what is possible."""
    run = open_run(tmp_path)
    with pytest.raises(Refused, match="a running run cannot become finished, only paused or draining"):
        run.finish(0)
    run.drain(0)
    with pytest.raises(Refused, match="a draining run cannot become paused"):
        run.pause(0)
    run.finish(0)
    with pytest.raises(Refused):
        run.pause(0)
    assert not run.drain(0)
    assert run.state == "finished"


def test_clock_counts_only_while_running_and_over_restarts(tmp_path: Path) -> None:
    """Pauses, draining and the time between two processes do not count."""
    run = open_run(tmp_path, 100)
    run.pause(110)
    assert run.elapsed_s(500) == 10
    run.resume(500, 0)
    assert run.elapsed_s(503) == 13
    run.tick(503)
    run = open_run(tmp_path, 2)
    assert run.elapsed_s(2) == 13
    run.drain(6)
    assert run.elapsed_s(50) == 17
    run.finish(60)
    assert open_run(tmp_path, 0).elapsed_s(99) == 17


def test_clock_after_a_kill_loses_at_most_the_time_between_two_stores(tmp_path: Path) -> None:
    """tick stores every few seconds, not at every call."""
    run = open_run(tmp_path, 0)
    run.tick(PERSIST_EVERY_S - 0.1)
    assert open_run(tmp_path, 0).elapsed_s(0) == 0
    run.tick(PERSIST_EVERY_S)
    run.tick(PERSIST_EVERY_S * 1.5)
    assert open_run(tmp_path, 0).elapsed_s(0) == PERSIST_EVERY_S


def test_limit_reached_says_which_and_forbids_to_resume(tmp_path: Path) -> None:
    """Minutes or agent steps, in words; a higher limit lets a finished run go on."""
    run = open_run(tmp_path, 0, minutes=1.0, agent_steps=1000)
    assert run.limit_reached(59, 999) == ""
    assert run.limit_reached(59, 1000) == "1000 agent steps played, run.agent_steps is 1000"
    assert run.limit_reached(60, 0) == "1.0 minutes trained, run.minutes is 1"
    run.drain(60)
    with pytest.raises(Refused, match=r"cannot resume: 1\.0 minutes trained"):
        run.resume(61, 0)
    run.finish(61)
    with pytest.raises(Refused, match="cannot resume"):
        run.resume(61, 0)
    run = open_run(tmp_path, 0, minutes=2.0)
    assert run.resume(0, 0)
    assert open_run(tmp_path, 0, minutes=None).limit_reached(1e9, 10**9) == ""


@pytest.mark.parametrize("kept_bytes", [0, 10, 40])
def test_run_with_a_damaged_file_does_not_open(tmp_path: Path, kept_bytes: int) -> None:
    """A new id would make every other service's state foreign."""
    open_run(tmp_path)
    path = tmp_path / "run.json"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(BrokenInvariant, match=r"run\.json is damaged"):
        open_run(tmp_path)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["pause", "resume", "drain", "finish", "tick", "restart"]), st.integers(0, 5)
        ),
        max_size=25,
    )
)
def test_clock_over_any_history_never_goes_back_nor_ahead(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is at most the time spent running and loses at most one store interval for each restart."""
    path, now = tmp_path_factory.mktemp("run"), 0.0
    run = open_run(path, now, minutes=None)
    true_s, restarts = 0.0, 0
    for action, seconds in steps:
        true_s += seconds if run.state == "running" else 0
        now += seconds
        run.tick(now)
        before, state = run.elapsed_s(now), run.state
        try:
            if action == "resume":
                run.resume(now, 0)
            elif action == "restart":
                run, restarts = open_run(path, now, minutes=None), restarts + 1
            else:
                getattr(run, action)(now)
        except Refused:
            assert run.state == state
        assert before - PERSIST_EVERY_S <= run.elapsed_s(now) <= before
        assert true_s - restarts * PERSIST_EVERY_S <= run.elapsed_s(now) <= true_s
