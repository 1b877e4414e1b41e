"""The run's config.yaml: what it was last started with, for whoever opens the run's directory later.

The launcher writes it before it starts anything; services that are started otherwise, as in containers, have
their config from the environment, and then the parameter server writes it.
"""

from __future__ import annotations

from pathlib import Path

from services.param_server.atomic_file import write_atomic
from shared.config import Config, dump_config, load_config
from shared.errors import ConfigError


def keep_config(run_dir: Path, config: Config) -> None:
    """Stores the config, if it can continue the run that is there."""
    path = run_dir / "config.yaml"
    if path.exists():
        before = load_config(path, environment={})
        if before == config:
            return
        check_continues(before, config)
    write_atomic(path, dump_config(config).encode())


def check_continues(before: Config, now: Config) -> None:
    """What was learned must still have its place: ConfigError names what has not."""
    if before.world.agents != now.world.agents:
        raise ConfigError(
            f"world.agents = {now.world.agents}, but this run has {before.world.agents}; "
            "begin a new run (in another directory or volume) for that"
        )
    for agent in before.learning_agents:  # its steps would go missing from the ledger with its buffer
        if not now.learns(agent):
            raise ConfigError(
                f"{agent} learned with {before.algorithm_of(agent)!r} in this run and cannot become "
                f"{now.algorithm_of(agent)}; begin a new run for that"
            )
