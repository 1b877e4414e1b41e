"""The launcher in lockstep: which end of a process ends the leg, and when a leg is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery import launcher as launcher_module
from rookery.launcher import Launcher, ServiceDied
from rookery.processes import Child
from rookery.run_directory import create_run
from rookery.view import View
from shared.config import load_config
from shared.errors import ConfigError
from shared.messages import RunState, RunStatus


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """One that started nothing; its drains are counted, and it looks again soon."""
    monkeypatch.setattr(launcher_module, "LOOK_AGAIN_S", 0.01)
    settings = ["parallel.async_learning=false", "run.manifest_minutes=1e-6"]
    run, config = create_run(load_config(None, settings, {}), tmp_path / "run")
    made = Launcher(run, config, View(config, live=False))
    made.drains = 0  # type: ignore[attr-defined]

    def count() -> None:
        made.drains += 1  # type: ignore[attr-defined]

    monkeypatch.setattr(made, "_drain", count)
    yield made
    made.processes.end(0.0)
    made.network.close()
    made.loop.close()


def status(state: RunState = "running", epochs: int = 0) -> RunStatus:
    return RunStatus(
        state=state,
        run_id="r",
        elapsed_s=1.0,
        epochs=epochs,
        env_steps=1,
        agent_steps=1,
        services=(),
        agents={},
        counters={},
    )


def child(service: str) -> Child:
    return Child(f"{service}-0", f"services.{service}", [])


def turns(launcher: Launcher) -> None:
    """A few turns of the loop, some longer than it waits to look again."""
    launcher.loop.turn_until(lambda: False, 0.05)


@pytest.mark.parametrize("service", ["actor", "learner", "replay", "param_server"])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_process_that_dies_in_a_round_ends_the_leg(
    launcher: Launcher, service: str, interrupted: int
) -> None:
    """Whether or not a person waits for the round to end: without it, it never would."""
    launcher.on_run_status(status())
    launcher.interrupted = interrupted
    launcher._on_ended(child(service), -9)
    assert launcher.loop.stopping
    with pytest.raises(ServiceDied, match=f"{service}-0 killed by signal 9") as caught:
        launcher._raise_if_died()
    assert caught.value.interrupted == bool(interrupted)


@pytest.mark.parametrize("service", ["actor", "learner"])
def test_process_that_leaves_a_round_on_purpose_ends_the_leg_too(launcher: Launcher, service: str) -> None:
    """Somebody sent it SIGTERM: the others would wait for it for ever."""
    launcher.on_run_status(status())
    launcher._on_ended(child(service), 0)
    assert launcher.died is None
    turns(launcher)
    assert launcher.died is not None


def test_process_that_hears_of_the_end_before_us_is_no_death(launcher: Launcher) -> None:
    """The news that the run drains is on its way."""
    launcher.on_run_status(status())
    launcher._on_ended(child("learner"), 0)
    launcher.on_run_status(status("draining"))
    turns(launcher)
    assert launcher.died is None


@pytest.mark.parametrize(
    ("service", "code", "dead"),
    [
        ("actor", 0, False),
        ("learner", 0, False),
        ("actor", -9, False),
        ("learner", 1, True),
        ("replay", -9, True),
    ],
)
def test_process_that_ends_while_draining_is_missed_if_it_had_something_to_leave(
    launcher: Launcher, service: str, code: int, dead: bool
) -> None:
    """A learner its checkpoint, replay where it stands; of an actor everything is stored by then."""
    launcher.on_run_status(status("draining"))
    launcher._on_ended(child(service), code)
    turns(launcher)
    assert (launcher.died is not None) == dead


def test_process_that_refuses_the_config_is_no_reason_to_go_back(launcher: Launcher) -> None:
    """It would refuse it again."""
    launcher.on_run_status(status())
    launcher._on_ended(child("learner"), 2)
    assert launcher.died is None
    with pytest.raises(ConfigError, match="learner-0 cannot work with this config"):
        launcher._join()


def test_death_before_anybody_answers_is_noticed_at_once(launcher: Launcher) -> None:
    """A minute of waiting for a parameter server that is gone helps nobody."""
    launcher.loop.after(0.01, lambda: launcher._on_ended(child("param_server"), -9))
    with pytest.raises(ServiceDied):
        launcher._join()


def test_leg_is_timed_from_its_first_round_on(launcher: Launcher) -> None:
    """However short legs are, each one plays."""
    launcher.on_run_status(status(epochs=40))
    launcher.on_run_status(status(epochs=40))
    turns(launcher)
    assert not launcher.leg_over
    launcher.on_run_status(status(epochs=48))
    launcher.on_run_status(status(epochs=56))
    turns(launcher)
    assert launcher.leg_over
    assert launcher.drains == 1  # type: ignore[attr-defined]


def test_leg_of_a_paused_run_is_over_once_it_goes_on(launcher: Launcher) -> None:
    """A person who paused it does not want it to run."""
    launcher.on_run_status(status(epochs=40))
    launcher.on_run_status(status("paused", epochs=48))
    turns(launcher)
    assert not launcher.leg_over
    launcher.on_run_status(status(epochs=48))
    turns(launcher)
    assert launcher.leg_over
