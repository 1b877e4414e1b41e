from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from rookery.view import View, headline, render_progress, render_status
from shared.config import Config, load_config
from shared.messages import AgentStatus, Failures, RunState, RunStatus, ServiceStatus


def make_service(service: str, holds: str = "", **changes: Any) -> ServiceStatus:
    fields: dict[str, Any] = {
        "service": service,
        "instance": f"{service}-0",
        "incarnation": "0" * 32,
        "pid": 1234,
        "host": "somewhere",
        "up_s": 3_725.0,
        "seen_s": 0.25,
        "ready": True,
        "done": False,
        "holds": holds,
        "waiting_for": "",
        "metrics": {},
    }
    return ServiceStatus(**(fields | changes))


def make_status(
    *services: ServiceStatus, state: RunState = "running", recent_return: float | None = None
) -> RunStatus:
    return RunStatus(
        state=state,
        run_id="r",
        elapsed_s=61.0,
        epochs=1_234,
        env_steps=5,
        agent_steps=67_890,
        services=services,
        agents={
            "agent_0": AgentStatus(version=9, updates=2, token=1, learner="", recent_return=recent_return)
        },
        counters={},
    )


def text_of(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain_view(config: Config | None = None) -> tuple[View, io.StringIO]:
    output = io.StringIO()
    return View(config or Config(), Console(file=output, width=200)), output


def test_progress_without_any_metrics_renders_with_dashes() -> None:
    """At the start nobody has said anything yet."""
    text = text_of(render_progress(make_status(), Config(), 0))
    row = next(row for row in text.splitlines() if row.startswith("agent_0"))
    assert row.split() == ["agent_0", "-", "-", "-", "0", "9", "-", "-"]


def test_progress_with_metrics_shows_them() -> None:
    """Return, loss, updates, steps, version and fill of each agent, and who waits for whom."""
    status = make_status(
        make_service("learner", "agent_0", metrics={"loss": 0.12345, "updates_per_s": 321.0}),
        make_service("learner", "agent_1", metrics={"loss": 9.0}),
        make_service("actor", metrics={"env_steps_per_s": 4_000.0, "version.agent_0": 7.0}),
        make_service("replay", metrics={"fill.agent_0": 0.5}, waiting_for="the parameter server"),
        recent_return=12.34,
    )
    text = text_of(render_progress(status, Config(), 2))
    row = next(row for row in text.splitlines() if row.startswith("agent_0"))
    assert row.split() == ["agent_0", "12.3", "0.1235", "321", "4,000", "9", "2.0", "50%"]
    assert "replay-0 waits for the parameter server" in text
    assert "2 restarts" in text


def test_progress_of_an_agent_that_learns_nothing_says_what_it_is() -> None:
    """It has a return and steps, and no loss, version lag or buffer to show."""
    config = load_config(None, ["agents.agent_0.algorithm=scripted"], environment={})
    status = make_status(make_service("actor", metrics={"env_steps_per_s": 50.0}), recent_return=160.0)
    status = status.model_copy(
        update={"agents": {"agent_0": status.agents["agent_0"].model_copy(update={"version": 0})}}
    )
    text = text_of(render_progress(status, config, 0))
    row = next(row for row in text.splitlines() if row.startswith("agent_0"))
    assert row.split() == ["agent_0", "(scripted)", "160.0", "-", "-", "50", "0", "-", "-"]
    view, output = plain_view(config)
    view.show(status, 0)
    assert "agent_0 (scripted): return 160.0, loss -, updates/s -," in output.getvalue()


def test_status_with_failures_says_how_often_when_and_why() -> None:
    """Whoever looks sees that a learner keeps dying, even between two of its lives."""
    reason = "ended with code 1 (RuntimeError: no loss\nsecond line)"
    failures = {
        "learner-0": Failures(count=3, reason=reason, seen_s=4.2),
        "actor-0": Failures(count=1, reason="killed by signal 9", seen_s=70.0),
    }
    text = text_of(render_status(make_status().model_copy(update={"failures": failures}), Config()))
    assert "learner-0 failed 3 times, the last 4 s ago: ended with code 1 (RuntimeError: no loss\n" in text
    assert "actor-0 failed 1 time, the last 70 s ago: killed by signal 9" in text
    assert "4 restarts" in text


def test_progress_of_a_learner_with_some_metrics_missing_renders() -> None:
    """A learner that has not trained yet has no loss."""
    status = make_status(make_service("learner", "agent_0", metrics={"updates_per_s": 0.0}))
    assert "agent_0" in text_of(render_progress(status, Config(), 0))


def test_progress_with_metrics_that_are_not_finite_renders() -> None:
    """A learner in trouble must not take the view with it."""
    metrics = {"loss": float("nan"), "updates_per_s": float("inf")}
    text = text_of(
        render_progress(make_status(make_service("learner", "agent_0", metrics=metrics)), Config(), 0)
    )
    assert "nan" in text


def test_headline_says_the_limit_only_if_there_is_one() -> None:
    """Training time of how much, epochs and steps, and restarts only if there were some."""
    assert "running | 61 of 120 s | epoch 1,234 | 67,890 agent steps" in headline(make_status(), Config(), 0)
    endless = load_config(None, ["run.minutes=null"], {})
    assert "| 61 s |" in headline(make_status(), endless, 0)
    assert "restarts" not in headline(make_status(), Config(), 0)


def test_status_shows_every_service_with_its_times() -> None:
    """Who runs where, since when, and when it was last heard."""
    status = make_status(make_service("learner", "agent_0"), make_service("actor", ready=False))
    text = text_of(render_status(status, Config()))
    assert "1:02:05" in text
    assert "0.2 s ago" in text
    assert "not yet" in text
    assert "1234" in text


@pytest.mark.parametrize("strange", ["[bold]", "[/nothing]", "[red", "path/[x]/y"])
def test_texts_that_look_like_markup_are_shown_as_they_are(strange: str) -> None:
    """Names and reasons come from outside; brackets in them are just brackets."""
    status = make_status(make_service("actor", instance=strange, waiting_for=strange))
    assert text_of(render_status(status, Config())).count(strange) == 4
    view, output = plain_view()
    view.say(f"run {strange}")
    assert strange in output.getvalue()


def test_plain_view_prints_a_line_now_and_then_and_at_every_change_of_state() -> None:
    """Into a file, a status every second would be too much."""
    view, output = plain_view()
    for state in ("running", "running", "paused", "paused"):
        view.show(make_status(state=state), 0)  # type: ignore[arg-type]
    view.close()
    lines = output.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines if " | " in line] == ["running", "paused"]
    assert lines[1].startswith("  agent_0: return -, loss -")


def test_view_on_a_terminal_refreshes_a_table() -> None:
    """On a terminal the same status is a live table."""
    output = io.StringIO()
    view = View(Config(), Console(file=output, force_terminal=True, width=120))
    try:
        view.show(make_status(), 0)
        view.say("a word in between")
    finally:
        view.close()
    assert "agent_0" in output.getvalue()
    assert "a word in between" in output.getvalue()
