"""`rookery replay`: what it says, what it refuses, and what restoring leaves behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from rookery import cli, replay_commands
from rookery.client import RunClient
from rookery.run_directory import RunDirectory, create_run
from services.param_server.service import ParamServer
from services.param_server.spec_book import SpecBook
from services.replay.buffer import AgentBuffer
from services.replay.limiter import check_limiter_values
from services.replay.service import ReplayService
from services.replay.snapshot import Snapshot
from shared.codec import pack_segment, segment_checksum
from shared.config import load_config
from shared.errors import Refused
from shared.messages import Segment
from shared.ownership import own
from worlds.registry import build_world

ACTIONS = ("snapshot", "restore", "limiter", "stats")


@pytest.fixture(autouse=True)
def _quiet_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of this process is the tests' own, and nobody waits long for runs that are dead."""
    monkeypatch.setattr(cli, "set_up_logging", lambda *_names: None)
    monkeypatch.setattr(replay_commands, "RunClient", functools.partial(RunClient, timeout_s=0.5))


def make_run(path: Path) -> RunDirectory:
    settings = ["world.agents=2", "world.max_turns=3", "replay.capacity_steps=64", "replay.min_steps=4"]
    run = create_run(load_config(None, settings, {}), path)[0]
    (path / "params").mkdir()
    SpecBook(path / "params" / "specs.json").register(build_world(run.config().world, 1, 0).specs)
    return run


def open_buffer(run: RunDirectory, agent: str) -> AgentBuffer:
    """As replay opens it."""
    config = run.config()
    learner = config.learner_for(agent)
    return AgentBuffer(
        run.replay / agent,
        agent,
        build_world(config.world, 1, 0).specs[agent],
        capacity_steps=config.replay.capacity_steps,
        segment_steps=config.segment_steps,
        n_step=learner.n_step,
        gamma=learner.gamma,
        alpha=learner.priority.alpha,
        priority_epsilon=learner.priority.epsilon,
        min_steps=config.replay.min_steps,
        samples_per_insert=config.replay.samples_per_insert,
        tolerance_samples=100.0,
        seed=0,
    )


def insert(buffer: AgentBuffer, sequence: int) -> None:
    lengths = {"before": 0, "owned": 3, "rows": 4}
    arrays = {
        column.name: np.full((4 - (column.per == "step"), *column.shape), 0, column.dtype.numpy)
        for column in buffer.spec.columns
    }
    segment = Segment(
        incarnation="0" * 32,
        agent=buffer.agent,
        sequence=sequence,
        produced_steps=3 * sequence,
        actor_index=0,
        slot=0,
        epoch=0,
        checksum=segment_checksum(pack_segment(buffer.spec, arrays)),
        **lengths,
    )
    assert buffer.insert(segment, arrays) == "stored"


def fill_and_snapshot(run: RunDirectory, snapshots: int) -> None:
    """Snapshot k holds k segments of each agent; the buffers one more."""
    buffers = {agent: open_buffer(run, agent) for agent in run.agents()}
    for number in range(1, snapshots + 2):
        for buffer in buffers.values():
            insert(buffer, number)
        if number <= snapshots:
            Snapshot(run.replay, 0, number, buffers).finish(10.0)


def stored(run: RunDirectory) -> dict[str, int]:
    return {agent: open_buffer(run, agent).drawable_steps for agent in run.agents()}


@pytest.mark.parametrize("arguments", [["replay"], *(["replay", "RUN", action] for action in ACTIONS)])
def test_help_of_every_replay_command_exits_with_0(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Help is never an error."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--help"])
    assert ended.value.code == 0
    assert "usage: rookery replay" in capsys.readouterr().out


@pytest.mark.parametrize("action", ACTIONS)
def test_replay_command_on_no_run_exits_with_2(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the directory and what it lacks."""
    assert cli.main(["replay", str(tmp_path), action]) == 2
    assert f"{tmp_path} is not a run" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["snapshot", "limiter", "stats"])
def test_replay_command_on_a_dead_run_exits_with_1(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nobody to ask."""
    make_run(tmp_path)
    assert cli.main(["replay", str(tmp_path), action]) == 1
    assert "not running" in capsys.readouterr().err


def test_restore_brings_the_newest_back_and_moves_the_present_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffers are the snapshot's, the replaced ones are kept whole, and the next command is named."""
    run = make_run(tmp_path)
    fill_and_snapshot(run, 2)
    assert cli.main(["replay", str(tmp_path), "restore"]) == 0
    said = capsys.readouterr().out
    assert "restored snapshot 2: agent_0 6 steps, agent_1 6 steps" in said
    assert str(run.replay / "before-restore-1") in said
    assert f"rookery train --resume {tmp_path}" in said
    assert set(stored(run).values()) == {6}
    assert {path.name for path in (run.replay / "before-restore-1").iterdir()} == {"agent_0", "agent_1"}


def test_restore_of_a_damaged_newest_takes_the_one_before_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One damaged agent is enough: all agents come from one moment."""
    run = make_run(tmp_path)
    fill_and_snapshot(run, 2)
    rows = run.replay / "snapshots" / "2" / "agent_1" / "rows"
    rows.write_bytes(rows.read_bytes()[:-1])
    assert cli.main(["replay", str(tmp_path), "restore"]) == 0
    assert "restored snapshot 1" in capsys.readouterr().out
    assert set(stored(run).values()) == {3}


def test_restore_of_a_number_takes_that_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever names a snapshot does not get another one."""
    run = make_run(tmp_path)
    fill_and_snapshot(run, 2)
    assert cli.main(["replay", str(tmp_path), "restore", "--number", "7"]) == 2
    assert "there is no snapshot 7; kept are: 2, 1" in capsys.readouterr().err
    (run.replay / "snapshots" / "2" / "agent_0" / "state").write_bytes(b"")
    assert cli.main(["replay", str(tmp_path), "restore", "--number", "2"]) == 2
    assert "snapshot 2 is damaged: agent_0: state has 0 bytes" in capsys.readouterr().err
    assert set(stored(run).values()) == {9}
    assert cli.main(["replay", str(tmp_path), "restore", "--number", "1"]) == 0
    assert set(stored(run).values()) == {3}


@pytest.mark.parametrize("lock", ["params/service.lock", "replay/service-0.lock"])
def test_restore_while_any_of_the_run_lives_is_refused(
    lock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither replay nor those who sent to it may be running; nothing is touched."""
    run = make_run(tmp_path)
    fill_and_snapshot(run, 1)
    held = own(tmp_path / lock)
    try:
        assert cli.main(["replay", str(tmp_path), "restore"]) == 2
    finally:
        os.close(held)
    assert f"{tmp_path} is running; stop it" in capsys.readouterr().err
    assert not list(run.replay.glob("before-restore-*"))


def test_restore_without_snapshots_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to bring back is an answer, not a traceback."""
    make_run(tmp_path)
    assert cli.main(["replay", str(tmp_path), "restore"]) == 2
    assert "none was taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"samples_per_insrt": 2.0}, "no setting samples_per_insrt; it has samples_per_insert and min_steps"),
        ({"samples_per_insert": 0.0}, "above 0"),
        ({"samples_per_insert": float("nan")}, "above 0"),
        ({"samples_per_insert": float("inf")}, "above 0"),
        ({"samples_per_insert": 1e306}, "at most 1e\\+06"),
        ({"min_steps": 0.0}, "from 1 to"),
        ({"min_steps": 2.5}, "whole number"),
        ({"min_steps": 65.0}, "64"),
        ({}, "nothing to set"),
    ],
)
def test_limiter_value_that_cannot_work_is_refused_in_words(values: dict[str, float], words: str) -> None:
    """The answer names the value and what is allowed."""
    with pytest.raises(Refused, match=words):
        check_limiter_values(values, 64)


# --- against services in threads of this process ----------------------------------------------------------


@pytest.fixture
def living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A run's parameter server and replay, without actors and learners."""
    monkeypatch.setattr("shared.loop.Loop.stop_on_signals", lambda _loop: None)  # threads get no signals
    run = make_run(tmp_path)
    monkeypatch.setattr(replay_commands, "RunClient", functools.partial(RunClient, timeout_s=20.0))
    with capture_logs():  # they would say it among the command's own lines
        end_params = in_a_thread(lambda: ParamServer(run.config(), run.path, "param_server"))
        end_replay = in_a_thread(lambda: ReplayService(run.config(), run.path, "replay-0"))
        yield run
        end_replay()
        end_params()


def in_a_thread(make: Callable[[], ParamServer | ReplayService]) -> Callable[[], None]:
    """Runs a service; returns how to end it."""
    made: list[ParamServer | ReplayService] = []
    began = threading.Event()

    def live() -> None:
        made.append(make())
        began.set()
        made[0].run()

    thread = threading.Thread(target=live)
    thread.start()
    assert began.wait(20.0)

    def end() -> None:
        made[0].loop.stop("the test is over")
        made[0].loop.wake()
        thread.join(20.0)
        assert not thread.is_alive()

    return end


def test_replay_commands_on_a_living_run_do_what_they_say(
    living: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limiter changes and refuses, snapshots are taken one after the other, stats show both."""
    path = str(living.path)
    assert cli.main(["replay", path, "snapshot"]) == 0
    assert "snapshot 1: agent_0 0 steps, agent_1 0 steps" in capsys.readouterr().out
    assert cli.main(["replay", path, "limiter", "--samples-per-insert", "2.5", "--min-steps", "8"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == [
        f"{agent}: 2.5 samples per insert" for agent in ("agent_0", "agent_1")
    ]
    assert cli.main(["replay", path, "limiter", "--min-steps", "9999"]) == 1
    assert "min_steps 9999: it must be a whole number from 1 to" in capsys.readouterr().err
    assert cli.main(["replay", path, "snapshot"]) == 0
    assert cli.main(["replay", path, "stats"]) == 0
    said = capsys.readouterr().out
    assert "batches from 8 steps on" in said
    assert "snapshot 1: there" in said
    assert cli.main(["replay", path, "stats", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["replay"][0]["buffers"]["agent_1"]["limiter"]["samples_per_insert"] == 2.5
    assert answer["snapshots"] == {"2": "", "1": ""}
    assert cli.main(["replay", path, "restore"]) == 2


def test_snapshot_is_a_new_one_where_nobody_sees_replays_disk(
    living: RunDirectory, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """On several machines the command runs beside the parameter server, and replay has a disk of its own."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(living.path / "config.yaml", elsewhere)
    for number in (1, 2):
        assert cli.main(["replay", str(elsewhere), "snapshot"]) == 0
        assert f"snapshot {number}: agent_0 0 steps" in capsys.readouterr().out
    assert sorted(path.name for path in (living.replay / "snapshots").iterdir()) == ["1", "2"]


def test_replay_command_takes_the_run_that_the_environment_names(
    living: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does in a container."""
    monkeypatch.setenv("ROOKERY_RUN__DIR", str(living.path))
    assert cli.main(["replay", "stats", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["replay"][0]["buffers"]) == {"agent_0", "agent_1"}


def test_snapshot_ordered_again_is_answered_from_the_disk(living: RunDirectory) -> None:
    """A repeated order takes no second snapshot, and a number below the newest is refused."""
    with RunClient(living.config(), timeout_s=20.0) as client:
        first = client.take_snapshot(3, 20.0)
        (root,) = (living.replay / "snapshots").iterdir()
        written = (root / "agent_0" / "manifest.json").stat().st_mtime_ns
        again = client.take_snapshot(3, 20.0)
        assert [part.steps for part in first] == [part.steps for part in again]
        assert (root / "agent_0" / "manifest.json").stat().st_mtime_ns == written
        with pytest.raises(Refused, match="take one above 3"):
            client.take_snapshot(2, 20.0)


@pytest.mark.parametrize("setting", ["parallel.async_learning=false", "parallel.enabled=false"])
def test_restore_of_a_run_in_rounds_exits_with_2(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Buffers without the learners and weights that fit them would end the run; the whole goes back."""
    run = make_run(tmp_path)
    fill_and_snapshot(run, 1)
    run.write_config(load_config(run.config_path, [setting], {}))
    assert cli.main(["replay", str(tmp_path), "restore"]) == 2
    assert "such a run goes back as a whole" in capsys.readouterr().err
