"""The algorithms by the names that a config gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.learner.algorithms.dqn import DQN
from shared.config import LearnerConfig
from shared.errors import ConfigError
from shared.specs import AgentSpec

ALGORITHMS: dict[str, Callable[[AgentSpec, LearnerConfig, torch.device, int], DQN]] = {"dqn": DQN}


def build_algorithm(spec: AgentSpec, config: LearnerConfig, device: torch.device, seed: int) -> DQN:
    """The algorithm that the config names."""
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(
            f"learner.algorithm = {config.algorithm!r}: known are {', '.join(sorted(ALGORITHMS))}"
        )
    return ALGORITHMS[config.algorithm](spec, config, device, seed)
