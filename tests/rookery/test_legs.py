"""A lockstep run in legs: copied now and then, and gone back when a process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookery import legs as legs_module
from rookery.launcher import Ending, NotBegun, ServiceDied
from rookery.legs import MOST_DEATHS, Legs
from rookery.run_directory import RunDirectory, create_run
from rookery.view import View
from shared.config import load_config
from shared.errors import ConfigError, Refused, RookeryError
from shared.messages import RunStatus

STATUS = RunStatus(
    state="finished",
    run_id="r",
    elapsed_s=1.0,
    epochs=1,
    env_steps=1,
    agent_steps=1,
    services=(),
    agents={},
    counters={},
)
Leg = Ending | RookeryError | Callable[[], Ending]


def ended(**changes: bool) -> Ending:
    return Ending(STATUS, {"lost": 0}, changes.pop("interrupted", False), 2.0, {}, **changes)


def died(instance: str = "replay-0", interrupted: bool = False) -> ServiceDied:
    return ServiceDied(instance, "killed by signal 9", 1.0, interrupted)


class Stage:
    """Legs with everything around them played by the test; `said` is what happened, in order."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, legs: list[Leg], *settings: str) -> None:
        config = load_config(None, ["parallel.async_learning=false", *settings], {})
        self.run, self.config = create_run(config, path)
        self.legs, self.said, self.copies = legs, list[str](), 0
        monkeypatch.setattr(legs_module, "Launcher", lambda *_: self)
        monkeypatch.setattr(legs_module, "write_manifest", self.write_manifest)
        monkeypatch.setattr(legs_module, "keep", self.keep)
        monkeypatch.setattr(legs_module, "go_back", self.go_back)

    def launch(self, resume: bool) -> Ending:
        assert not self.run.manifest_path.exists(), "a run that is open has no manifest"
        self.said.append("resumed" if resume else "begun")
        leg = self.legs.pop(0)
        if isinstance(leg, RookeryError):
            raise leg
        return leg if isinstance(leg, Ending) else leg()

    def write_manifest(self, run: RunDirectory, _config: object) -> dict[str, Any]:
        self.said.append("described")
        run.manifest_path.write_text("{}")
        return {"agents": {"agent_0": {"rounds": 1}}}

    def keep(self, _run: RunDirectory) -> None:
        self.said.append("kept")
        self.copies += 1

    def go_back(self, run: RunDirectory) -> bool:
        self.said.append("went back")
        run.manifest_path.unlink(missing_ok=True)
        return self.copies > 0

    def play(self, resume: bool = False) -> Ending:
        return Legs(self.run, self.config, View(self.config, live=False)).launch(resume)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    return lambda *legs: Stage(tmp_path / "run", monkeypatch, list(legs))


def test_run_in_one_leg_ends_with_a_manifest(stage: Callable[..., Stage]) -> None:
    """Nothing is copied for it."""
    played = stage(ended())
    ending = played.play()
    assert played.said == ["begun", "described"]
    assert (ending.wall_s, ending.restarts, ending.interrupted) == (2.0, {}, False)


def test_run_in_three_legs_is_copied_between_them(stage: Callable[..., Stage]) -> None:
    """And each leg goes on from the one before."""
    played = stage(ended(leg_over=True), ended(leg_over=True), ended())
    assert played.play().wall_s == 6.0
    copied = ["described", "kept", "resumed"]
    assert played.said == ["begun", *copied, *copied, "described"]


def test_leg_that_ends_with_the_last_round_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied, and nobody is started to find that out."""
    played = Stage(tmp_path / "run", monkeypatch, [ended(leg_over=True)], "run.agent_steps=1")
    played.play()
    assert played.said == ["begun", "described"]


def test_leg_that_ends_just_when_the_time_is_over_is_the_last(stage: Callable[..., Stage]) -> None:
    """The next one is refused, since there is nothing left to play: that is an end, not an error."""
    played = stage(ended(leg_over=True), Refused("limit_reached", "run.minutes is 2"))
    ending = played.play()
    assert not ending.leg_over
    assert ending.wall_s == 2.0
    assert played.said[-1] == "described"
    assert played.run.manifest_path.exists()


def test_interrupt_while_the_next_leg_starts_ends_the_run_where_the_last_one_did(
    stage: Callable[..., Stage],
) -> None:
    """Nothing of it has moved: it is described again, and can be resumed; so also after it went back."""
    played = stage(ended(leg_over=True), died(), NotBegun("interrupted"))
    ending = played.play()
    assert ending.interrupted
    assert played.run.manifest_path.exists()


@pytest.mark.parametrize(
    "error",
    [
        Refused("limit_reached", "minutes"),
        Refused("other_run", "x"),
        ConfigError("no"),
        NotBegun("interrupted"),
    ],
)
def test_first_leg_that_is_refused_is_an_error(stage: Callable[..., Stage], error: RookeryError) -> None:
    """A person asked for something that cannot be."""
    with pytest.raises(type(error)):
        stage(error).play(resume=True)


def test_run_whose_process_dies_goes_back_and_plays_again(stage: Callable[..., Stage]) -> None:
    """To its copy if there is one; restarts are counted by process."""
    played = stage(died(), ended(leg_over=True), died("learner-1"), ended())
    ending = played.play()
    assert played.said == [
        *("begun", "went back"),
        *("begun", "described", "kept"),
        *("resumed", "went back"),
        *("resumed", "described"),
    ]
    assert ending.restarts == {"replay-0": 1, "learner-1": 1}
    assert ending.wall_s == 6.0


def test_run_that_dies_again_and_again_is_given_up_with_its_log(stage: Callable[..., Stage]) -> None:
    """Without a leg finished in between it is the same place every time."""
    played = stage(*[died()] * (MOST_DEATHS - 1), ended(leg_over=True), *[died()] * MOST_DEATHS)
    with pytest.raises(RookeryError, match=rf"replay-0 .* {MOST_DEATHS} times in a row .*replay-0\.log"):
        played.play()
    assert not played.legs


def test_run_that_dies_while_it_ends_is_not_played_again(stage: Callable[..., Stage]) -> None:
    """A person wants it to end; what can be done is said."""
    played = stage(died(interrupted=True))
    with pytest.raises(RookeryError, match=r"while the run was ending .*--resume goes back"):
        played.play()
    assert played.said == ["begun"]


def test_run_ended_at_once_has_no_manifest(stage: Callable[..., Stage]) -> None:
    """It is in the middle of a round."""
    played = stage(ended(interrupted=True, ended_at_once=True))
    assert played.play().ended_at_once
    assert played.said == ["begun"]


def test_interrupted_leg_is_the_last(stage: Callable[..., Stage]) -> None:
    """It stops between two rounds and can be resumed."""
    played = stage(ended(interrupted=True))
    assert played.play().interrupted
    assert played.said == ["begun", "described"]


def test_interrupt_while_the_run_is_copied_ends_it_after_the_copy(stage: Callable[..., Stage]) -> None:
    """No launcher is there to take it; the copy is finished first."""

    def leg() -> Ending:
        os.kill(os.getpid(), signal.SIGINT)  # by now the launcher has given the signal back
        return ended(leg_over=True)

    played = stage(leg)
    ending = played.play()
    assert ending.interrupted
    assert played.said == ["begun", "described", "kept"]
