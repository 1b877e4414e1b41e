"""The keys of `parallel:`: what they mean together, and what is refused with a reason."""

from __future__ import annotations

import pytest

from shared.config import Config, load_config
from shared.errors import ConfigError

LOCKSTEP, SEQUENTIAL = "parallel.async_learning=false", "parallel.enabled=false"


def load(*settings: str) -> Config:
    return load_config(None, settings, {})


def refusal(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ([], "async"),
        ([LOCKSTEP], "lockstep"),
        ([SEQUENTIAL], "sequential"),
        ([LOCKSTEP, SEQUENTIAL], "sequential"),
    ],
)
def test_mode_follows_from_enabled_and_async_learning(settings: list[str], mode: str) -> None:
    """One process decides over everything; else whether it learns in rounds."""
    assert load(*settings).parallel.mode == mode


@pytest.mark.parametrize(
    ("settings", "at_once"),
    [
        ([], None),
        (["parallel.num_workers=3"], 3),
        (["parallel.parallel_training=false"], 1),
        (["parallel.parallel_training=false", "parallel.num_workers=1"], 1),
    ],
)
def test_training_at_once_follows_from_parallel_training_and_num_workers(
    settings: list[str], at_once: int | None
) -> None:
    """None: all agents."""
    assert load(*settings).parallel.training_at_once == at_once


@pytest.mark.parametrize("settings", [[], [LOCKSTEP]])
def test_use_threads_where_learners_are_processes_is_refused(settings: list[str]) -> None:
    """With the reason, and where threads belong."""
    said = refusal("parallel.use_threads=true", *settings)
    assert "use_threads: with enabled: true every learner is a process of its own" in said
    assert load("parallel.use_threads=true", SEQUENTIAL).parallel.use_threads


def test_num_workers_against_parallel_training_false_is_refused() -> None:
    """The two contradict each other; the message has both values."""
    said = refusal("parallel.parallel_training=false", "parallel.num_workers=2")
    assert "num_workers = 2 with parallel_training = false" in said


@pytest.mark.parametrize(
    "setting",
    [
        "parallel.num_workers=0",
        "parallel.train_interval=0",
        "parallel.lag_rounds=2",
        "parallel.lag_rounds=-1",
    ],
)
def test_number_outside_its_bounds_names_its_key(setting: str) -> None:
    """And what is allowed."""
    assert setting.partition("=")[0] in refusal(setting)


@pytest.mark.parametrize("mode", [LOCKSTEP, SEQUENTIAL])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("learner.workers=2", "learner.workers = 2: several gradient workers"),
        ("agents.agent_1.workers=3", "learner.workers = 3"),
        ("param_server.broadcast_dtype=float16", "param_server.broadcast_dtype = float16"),
        ("param_server.keep_versions=2", "param_server.keep_versions = 2"),
    ],
)
def test_what_cannot_be_repeated_is_refused_in_rounds_and_only_there(
    mode: str, setting: str, words: str
) -> None:
    """Each with its value, why, and what to set instead."""
    said = refusal(mode, setting)
    assert words in said
    assert ("lockstep" if mode == LOCKSTEP else "sequential") in said
    load(setting)


@pytest.mark.parametrize("setting", ["learner.threads=2", "agents.agent_2.threads=2"])
def test_several_threads_of_torch_are_refused_in_lockstep_alone(setting: str) -> None:
    """Sums of several threads are rounded otherwise; a sequential run by itself may be fast instead."""
    assert "learner.threads = 2: sums made by several threads" in refusal(LOCKSTEP, setting)
    load(SEQUENTIAL, setting)
    load(setting)
