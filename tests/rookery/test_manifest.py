"""The manifest of a run in rounds: what it proves, what it refuses, and the way back to a copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from rookery.manifest import check_manifest, go_back, has_kept, is_at_rest, keep, settle, write_manifest
from rookery.run_directory import RunDirectory, create_run
from rookery.sequential import SequentialRun
from rookery.view import View
from services.replay.rounds import AT_REST
from shared.config import Config, build_config, load_config, merged
from shared.errors import ConfigError, Refused

SETTINGS = [
    "world.agents=2",
    "world.max_turns=5",
    "actor.envs=2",
    "replay.capacity_steps=64",
    "replay.min_steps=16",
    "replay.samples_per_insert=1",
    "learner.batch_size=8",
    "learner.network.hidden=[4]",
    "run.minutes=null",
    "run.agent_steps=80",
    "parallel.enabled=false",
]


def launch(run: RunDirectory, config: Config, resume: bool = False) -> None:
    SequentialRun(run, config, View(config, live=False)).launch(resume)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds of two agents, stopped between two rounds."""
    path = tmp_path_factory.mktemp("trained") / "run"
    launch(*create_run(load_config(None, SETTINGS, {}), path))
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDirectory:
    """A copy of its own for each test."""
    shutil.copytree(trained, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def changed(config: Config, **changes: Any) -> Config:
    return build_config(merged(config.model_dump(mode="json"), changes))


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {
        str(path.relative_to(run.path)): path.read_bytes()
        for part in ("params", "checkpoints", "replay")
        for path in sorted((run.path / part).rglob("*"))
        if path.is_file()
    }


def test_manifest_of_a_run_that_ended_names_its_parts(run: RunDirectory) -> None:
    """Rounds, draws, versions and checkpoints of every agent, and what the actors played."""
    manifest = json.loads(run.manifest_path.read_text())
    assert manifest["agent_steps"] == 80
    assert manifest["settings"]["seed"] == 0
    assert set(manifest["agents"]) == {"agent_0", "agent_1"}
    for part in manifest["agents"].values():
        assert (part["rounds"], part["checkpoint_rounds"], part["version"]) == (4, 4, 5)
        assert part["draws"] == part["updates"] == (40 - 16) // 8
        assert AT_REST in part["replay_xxh3"]
    check_manifest(run, run.config())
    assert write_manifest(run, run.config()) == manifest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed = 1, the run was made with 0"),
        ({"actor": {"count": 2}}, "actor.count = 2"),
        ({"actor": {"envs": 3}}, "actor.envs = 3"),
        ({"world": {"max_turns": 6}}, "world.max_turns = 6"),
        ({"replay": {"samples_per_insert": 2}}, "replay.samples_per_insert = 2.0"),
        ({"replay": {"min_steps": 17}}, "replay.min_steps = 17"),
        ({"parallel": {"train_interval": 2}}, "parallel.train_interval = 2"),
        ({"agents": {"agent_1": {"batch_size": 9}}}, "learner.batch_size = {'agent_0': 8, 'agent_1': 9}"),
    ],
)
def test_check_of_a_config_that_makes_another_run_names_the_key(
    run: RunDirectory, changes: dict[str, Any], words: str
) -> None:
    """What the schedule is computed from cannot change in the middle."""
    with pytest.raises(ConfigError) as caught:
        check_manifest(run, changed(run.config(), **changes))
    assert words in str(caught.value)
    assert "it would not be the same run" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": {"agent_steps": 500}},
        {"parallel": {"enabled": True, "async_learning": False}},
        {"replay": {"services": 2}},
    ],
    ids=["longer", "lockstep", "services"],
)
def test_check_of_a_config_that_changes_where_and_how_long_passes(
    run: RunDirectory, changes: dict[str, Any]
) -> None:
    """In processes or in one, on more replay services, for longer: it is the same run."""
    check_manifest(run, changed(run.config(), **changes))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("replay/agent_1/priorities", "agent_1: replay_xxh3"),
        ("replay/agent_0/streams", "agent_0: replay_xxh3"),
        ("checkpoints/agent_1/*.ckpt", "agent_1: checkpoint_xxh3"),
        ("params/agents/agent_0/*5.safetensors", "agent_0: "),
    ],
)
def test_check_of_a_file_with_one_other_bit_names_it(run: RunDirectory, pattern: str, words: str) -> None:
    """Every file that the run goes on from is proven."""
    path = sorted(run.path.glob(pattern))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        check_manifest(run, run.config())


def test_check_of_a_buffer_without_its_file_at_rest_is_refused(run: RunDirectory) -> None:
    """The message names the agent."""
    (run.replay / "agent_1" / AT_REST).unlink()
    with pytest.raises(ConfigError, match="agent_1 was not stopped between two rounds"):
        check_manifest(run, run.config())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {}, "agents": 3}'])
def test_check_of_a_manifest_that_is_none_is_refused_by_name(run: RunDirectory, text: str) -> None:
    """Not with a traceback."""
    run.manifest_path.write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read"):
        check_manifest(run, run.config())


# --- parts that do not fit --------------------------------------------------------------------------------


def test_manifest_of_a_learner_that_left_no_checkpoint_is_refused(run: RunDirectory) -> None:
    """It could not be resumed."""
    shutil.rmtree(run.path / "checkpoints" / "agent_1")
    with pytest.raises(ConfigError, match="agent_1 left no checkpoint"):
        write_manifest(run, run.config())


def test_manifest_of_a_checkpoint_of_another_round_is_refused(run: RunDirectory) -> None:
    """The parameter server may not have taken the last one in time."""
    (path,) = (run.path / "checkpoints" / "agent_1").glob("*.ckpt")
    path.write_bytes(path.read_bytes().replace(b'\\"rounds\\": 4', b'\\"rounds\\": 3'))
    with pytest.raises(ConfigError, match="agent_1's checkpoint is at round 3"):
        write_manifest(run, run.config())


def test_manifest_of_a_checkpoint_that_is_none_is_refused_by_name(run: RunDirectory) -> None:
    """Whatever lies there."""
    (path,) = (run.path / "checkpoints" / "agent_1").glob("*.ckpt")
    path.write_bytes(b"[]\nnothing")
    with pytest.raises(ConfigError, match=r"agent_1.*is not a checkpoint of a run in rounds"):
        write_manifest(run, run.config())


def test_manifest_of_weights_of_another_round_is_refused(run: RunDirectory) -> None:
    """A phase was trained and its version is missing."""
    newest = sorted((run.path / "params" / "agents" / "agent_0").glob("*.safetensors"))[-1]
    newest.unlink()
    with pytest.raises(ConfigError, match="agent_0's weights is at round 3"):
        write_manifest(run, run.config())


def test_manifest_of_a_run_that_never_began_is_refused(tmp_path: Path) -> None:
    """There is nothing to come back to."""
    run, config = create_run(load_config(None, SETTINGS, {}), tmp_path / "run")
    with pytest.raises(ConfigError, match="no agent that learned anything yet"):
        write_manifest(run, config)
    assert not settle(run, config)


# --- without a manifest -----------------------------------------------------------------------------------


def test_settle_of_a_run_that_was_opened_and_not_moved_makes_it_whole(run: RunDirectory) -> None:
    """Its manifest is gone from the moment it is opened; its files still fit together."""
    before = json.loads(run.manifest_path.read_text())
    run.manifest_path.unlink()
    assert settle(run, run.config())
    assert json.loads(run.manifest_path.read_text()) == before


def test_settle_of_a_run_with_more_played_than_stored_leaves_no_manifest(run: RunDirectory) -> None:
    """Actors told of a round that was lost with them: counted again it would count twice."""
    run.manifest_path.unlink()
    lines = run.progress_path.read_text().splitlines(keepends=True)
    run.progress_path.write_text("".join([*lines, lines[-1].replace('"number":4', '"number":5')]))
    assert not settle(run, run.config())
    assert not is_at_rest(run)


def test_settle_of_a_run_in_the_middle_of_a_round_is_refused(run: RunDirectory) -> None:
    """Without the file at rest nobody knows where the buffer stands."""
    run.manifest_path.unlink()
    (run.replay / "agent_0" / AT_REST).unlink()
    assert not settle(run, run.config())
    assert not is_at_rest(run)


def test_resume_at_the_limit_is_refused_and_leaves_the_run_as_it_was(run: RunDirectory) -> None:
    """Refused for its steps or its minutes, it can be resumed with more of them."""
    config = run.config()
    with pytest.raises(ConfigError, match=r"run\.agent_steps were played"):
        launch(run, config, resume=True)
    with pytest.raises(Refused, match=r"run\.minutes"):
        launch(run, changed(config, run={"agent_steps": 160, "minutes": 1e-9}), resume=True)
    assert not is_at_rest(run)
    assert settle(run, config)
    check_manifest(run, config)
    launch(run, changed(config, run={"agent_steps": 160}), resume=True)
    assert json.loads(run.manifest_path.read_text())["agent_steps"] == 160


# --- copies -----------------------------------------------------------------------------------------------


def test_run_goes_back_to_its_copy_as_often_as_it_must(run: RunDirectory) -> None:
    """Byte for byte, with its manifest, whatever became of the files since."""
    assert not has_kept(run)
    before = contents(run)
    keep(run)
    for _ in range(2):
        launch(run, changed(run.config(), run={"agent_steps": 120}), resume=True)
        run.manifest_path.unlink()
        (run.path / "replay" / "agent_0" / "more").touch()
        assert contents(run) != before
        assert go_back(run)
        assert contents(run) == before
        check_manifest(run, run.config())


def test_second_copy_takes_the_place_of_the_first(run: RunDirectory) -> None:
    """One copy is kept; snapshots of replay are not part of it."""
    (run.replay / "snapshots" / "1").mkdir(parents=True)
    keep(run)
    launch(run, changed(run.config(), run={"agent_steps": 120}), resume=True)
    newest = contents(run)
    (run.path / "manifest.tmp").mkdir()  # of a copy that was interrupted
    keep(run)
    assert go_back(run)
    assert contents(run) == newest
    assert sorted(path.name for path in run.path.glob("manifest*")) == ["manifest", "manifest.json"]
    assert not (run.path / "manifest" / "replay" / "snapshots").exists()


def test_run_without_a_copy_goes_back_to_nothing(run: RunDirectory) -> None:
    """It begins anew, and is told so."""
    assert not go_back(run)
    assert not contents(run)
    assert not is_at_rest(run)


def test_sequential_run_that_goes_back_comes_to_the_same_files(run: RunDirectory) -> None:
    """Played again from the copy, the same weights."""

    def weights() -> dict[str, bytes]:
        return {
            f"{name}/{tensor}": values.tobytes()
            for name, data in contents(run).items()
            if name.endswith(".safetensors")
            for tensor, values in load(data).items()
        }

    config = changed(run.config(), run={"agent_steps": 160})
    keep(run)
    launch(run, config, resume=True)
    first = weights()
    go_back(run)
    assert weights() != first
    launch(run, config, resume=True)
    assert weights() == first


def test_sequential_run_keeps_copies_while_it_trains(tmp_path: Path) -> None:
    """Every `run.manifest_minutes`; the copy is a run at rest, the run itself is not."""
    config = load_config(None, [*SETTINGS, "run.manifest_minutes=1e-6", "run.agent_steps=60"], {})
    run, config = create_run(config, tmp_path / "run")
    launch(run, config)
    kept = json.loads((run.path / "manifest" / "manifest.json").read_text())
    assert {part["rounds"] for part in kept["agents"].values()} == {3}
    check_manifest(run, config)
    assert go_back(run)
    check_manifest(run, config)
