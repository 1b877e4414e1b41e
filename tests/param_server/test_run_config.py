"""config.yaml of a run that no launcher started."""

from pathlib import Path

import pytest

from services.param_server.run_config import keep_config
from shared.config import Config, load_config
from shared.errors import ConfigError


def config(*settings: str) -> Config:
    return load_config(None, settings, environment={})


def kept(run_dir: Path) -> Config:
    return load_config(run_dir / "config.yaml", environment={})


def test_config_of_a_new_run_is_kept(tmp_path: Path) -> None:
    keep_config(tmp_path, config("world.agents=2"))
    assert kept(tmp_path) == config("world.agents=2")


def test_same_config_is_not_written_again(tmp_path: Path) -> None:
    """What the launcher wrote stays as it is, comments and all."""
    (tmp_path / "config.yaml").write_text("# mine\nseed: 7\n")
    keep_config(tmp_path, config("seed=7"))
    assert (tmp_path / "config.yaml").read_text() == "# mine\nseed: 7\n"


def test_changed_settings_are_kept(tmp_path: Path) -> None:
    keep_config(tmp_path, config("learner.lr=1e-3"))
    keep_config(tmp_path, config("learner.lr=1e-4"))
    assert kept(tmp_path).learner.lr == 1e-4


def test_another_number_of_agents_is_refused_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
    keep_config(tmp_path, config("world.agents=3"))
    with pytest.raises(ConfigError, match=r"world\.agents = 5, but this run has 3"):
        keep_config(tmp_path, config("world.agents=5"))
    assert kept(tmp_path).world.agents == 3


def test_agent_that_learned_must_go_on_learning(tmp_path: Path) -> None:
    keep_config(tmp_path, config())
    with pytest.raises(ConfigError, match="agent_1 learned with 'dqn' in this run and cannot become random"):
        keep_config(tmp_path, config("agents.agent_1.algorithm=random"))
