"""The algorithms: `base.py` says what one is, each of the others is one, top to bottom."""

from __future__ import annotations

import torch

from services.learner.algorithms.base import Algorithm
from shared.algorithms import algorithm_class
from shared.config import LearnerConfig
from shared.errors import ConfigError
from shared.specs import AgentSpec


def build_algorithm(spec: AgentSpec, config: LearnerConfig, device: torch.device, seed: int) -> Algorithm:
    """The algorithm that the config names."""
    found = algorithm_class(config.algorithm)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"learner.algorithm = {config.algorithm!r} is {found!r}: write a subclass of "
            "services.learner.algorithms.base.Algorithm"
        )
    try:
        return found(spec, config, device, seed)
    except ValueError as error:  # for example a spec without a discrete action
        raise ConfigError(f"learner.algorithm = {config.algorithm!r}: {error}") from None
