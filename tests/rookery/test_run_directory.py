from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from rookery.run_directory import (
    PORTS,
    RunDirectory,
    create_run,
    free_ports,
    open_run,
    ports_are_free,
    read_progress,
    with_free_ports,
)
from services.param_server.spec_book import SpecBook
from services.param_server.versions import VersionStore
from shared.config import Config, load_config
from shared.errors import ConfigError
from shared.specs import AgentSpec, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(2), discrete=Discrete(n=2))


def make_run(path: Path, *settings: str) -> RunDirectory:
    return create_run(load_config(None, settings, {}), path)[0]


def publish(run: RunDirectory, agent: str, count: int) -> None:
    store = VersionStore(run.path / "params" / "agents", keep=10)
    for number in range(count):
        tensors = {"w": np.full(2, number + 1, np.float32)}
        store.publish(agent, tensors, publish_id=f"p{number}", updates=number, token=1)


def ports_of(config: Config) -> list[int]:
    endpoints = [config.endpoints.params, config.endpoints.broadcast]
    for replay in config.endpoints.replay:
        endpoints += [replay.segments, replay.requests]
    return [int(endpoint.rsplit(":", 1)[1]) for endpoint in endpoints]


def test_created_run_keeps_its_whole_config_with_ports_of_its_own(tmp_path: Path) -> None:
    """The directory is enough to find the run again: every setting, every endpoint."""
    run, config = create_run(load_config(None, ["seed=5", "replay.services=3"], {}), tmp_path / "run")
    assert open_run(tmp_path / "run").config() == config
    assert (config.seed, config.run.dir) == (5, str(tmp_path / "run"))
    assert len(config.endpoints.replay) == 3
    assert len(set(ports_of(config))) == 8
    assert run.logs.is_dir()
    assert run.plots.is_dir()


def test_run_that_exists_is_not_changed_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is read once, when a run is created."""
    run = make_run(tmp_path / "run", "seed=5")
    monkeypatch.setenv("ROOKERY_SEED", "6")
    assert run.config().seed == 5


def test_directory_that_is_not_empty_is_not_made_a_run(tmp_path: Path) -> None:
    """Nothing is overwritten; the message says how to continue instead."""
    (tmp_path / "something").touch()
    with pytest.raises(ConfigError, match=f"--resume {tmp_path}"):
        create_run(Config(), tmp_path)


def test_empty_directory_is_made_a_run(tmp_path: Path) -> None:
    """A directory made beforehand is as good as none."""
    assert make_run(tmp_path).config_path.exists()


def test_file_in_the_place_of_a_run_directory_is_refused(tmp_path: Path) -> None:
    """A path that is a file cannot hold a run."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        create_run(Config(), tmp_path / "file")


def test_run_without_a_path_is_named_after_its_world_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in the same second have two names."""
    monkeypatch.chdir(tmp_path)
    runs = [create_run(Config(), None)[0] for _ in range(2)]
    assert runs[0].path != runs[1].path
    assert all(run.path.parent == Path("runs") for run in runs)
    assert all(run.path.name.startswith("treasure_hunt-") for run in runs)


def test_run_with_its_place_in_the_config_is_made_there(tmp_path: Path) -> None:
    """`run.dir` is used when no path is given."""
    run, _config = create_run(load_config(None, [f"run.dir={tmp_path / 'there'}"], {}), None)
    assert run.path == tmp_path / "there"


def test_directory_without_a_config_is_no_run(tmp_path: Path) -> None:
    """The message names the path and what is missing."""
    with pytest.raises(ConfigError, match=r"is not a run: it has no config\.yaml"):
        open_run(tmp_path)


def test_written_config_replaces_the_old_one_whole(tmp_path: Path) -> None:
    """No half-written config and no temporary file is left."""
    run = make_run(tmp_path, "seed=1")
    run.write_config(load_config(None, ["seed=2"], {}))
    assert run.config().seed == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "logs", "plots"]


def test_free_ports_are_different_bindable_and_below_the_ephemeral_range() -> None:
    """No port is given twice, none is taken, none is one that outgoing connections may use."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(port in PORTS for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_ports_in_use_are_noticed_and_replaced(tmp_path: Path) -> None:
    """A run whose port somebody else has now gets new ones."""
    config = with_free_ports(Config(), tmp_path)
    assert ports_are_free(config)
    for port in ports_of(config):
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            other.listen()
            assert not ports_are_free(config)
    assert ports_are_free(with_free_ports(config, tmp_path))


def test_run_that_never_ran_has_nothing_yet(tmp_path: Path) -> None:
    """No clock, no agents, no progress: all are empty rather than errors."""
    run = make_run(tmp_path)
    assert run.elapsed_s() == 0.0
    assert run.agents() == []
    assert read_progress(run.progress_path) == []


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"elapsed_s": null}'])
def test_run_clock_that_cannot_be_read_is_zero(tmp_path: Path, text: str) -> None:
    """A damaged clock does not stop anybody from looking at a run."""
    run = make_run(tmp_path)
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "run.json").write_text(text)
    assert run.elapsed_s() == 0.0


def test_run_clock_is_the_one_stored(tmp_path: Path) -> None:
    """Seconds as the parameter server last wrote them."""
    run = make_run(tmp_path)
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "run.json").write_text('{"elapsed_s": 12.5}')
    assert run.elapsed_s() == 12.5


def test_agents_are_those_of_the_specs_in_their_order(tmp_path: Path) -> None:
    """Order matters: it is the acting order of the world."""
    run = make_run(tmp_path)
    (tmp_path / "params").mkdir()
    SpecBook(tmp_path / "params" / "specs.json").register({f"agent_{number}": SPEC for number in (0, 1, 10)})
    assert run.agents() == ["agent_0", "agent_1", "agent_10"]


def test_weights_are_the_newest_or_the_version_asked_for(tmp_path: Path) -> None:
    """What the parameter server stored can be read without it."""
    run = make_run(tmp_path)
    publish(run, "agent_0", 3)
    assert run.weights("agent_0").version == 3
    stored = run.weights("agent_0", 2)
    assert (stored.version, stored.tensors["w"].tolist()) == (2, [2.0, 2.0])


def test_weights_whose_newest_file_is_damaged_are_the_version_before(tmp_path: Path) -> None:
    """A torn file is passed over; asked for by number, it is refused with the reason."""
    run = make_run(tmp_path)
    publish(run, "agent_0", 2)
    newest = max((tmp_path / "params" / "agents" / "agent_0").glob("*.safetensors"))
    os.truncate(newest, 20)
    assert run.weights("agent_0").version == 1
    with pytest.raises(ConfigError, match="version 2 of agent_0 cannot be read"):
        run.weights("agent_0", 2)


def test_weights_that_are_not_there_are_refused_in_words(tmp_path: Path) -> None:
    """No version at all, and a version that is not kept, are two different messages."""
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match="no weights of agent_0 yet"):
        run.weights("agent_0")
    publish(run, "agent_0", 2)
    with pytest.raises(ConfigError, match=r"no version 9; kept are \[1, 2\]"):
        run.weights("agent_0", 9)


def test_progress_with_damaged_or_torn_lines_is_read_without_them(tmp_path: Path) -> None:
    """A line that is still being written, or that a disk has damaged, is not an error."""
    whole = {
        "t": 1.0,
        "actor": 0,
        "incarnation": "a" * 32,
        "number": 1,
        "epochs": 2,
        "env_steps": 3,
        "agent_steps": 4,
        "return_sums": {"agent_0": 5.0},
    }
    path = tmp_path / "progress.jsonl"
    path.write_text(json.dumps(whole) + "\n{damaged}\n" + json.dumps(whole) + '\n{"t": 3')
    assert read_progress(path) == [whole, whole]
