"""The algorithms: `base.py` says what one is, each of the others is one, top to bottom."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np
import torch

from services.learner.algorithms.base import Algorithm
from shared.algorithms import algorithm_class, network_class
from shared.config import Config, LearnerConfig
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
    network_class(config.algorithm)  # says what is wrong with its network, if anything is
    if inspect.isabstract(found):
        raise ConfigError(f"learner.algorithm = {config.algorithm!r} has no method `loss`: write one")
    try:
        return found(spec, config, device, seed)
    except ValueError as error:  # for example a spec without a discrete action
        raise ConfigError(f"learner.algorithm = {config.algorithm!r}: {error}") from None


def algorithm_for(config: Config, specs: Mapping[str, AgentSpec], agent: str) -> Algorithm:
    """One agent's algorithm on its device, with a seed of its own."""
    settings, order = config.learner_for(agent), sorted(specs).index(agent)
    seed = int(np.random.SeedSequence([config.seed, order]).generate_state(1)[0])
    learning = sorted(name for name in specs if config.learns(name))  # the others need no GPU
    return build_algorithm(specs[agent], settings, pick_device(settings.device, learning.index(agent)), seed)


def pick_device(name: str, order: int) -> torch.device:
    """`auto`: the GPUs in turn, by the agent's place among those that learn; the CPU where there is none."""
    if name != "auto":
        return torch.device(name)
    gpus = torch.cuda.device_count()
    return torch.device(f"cuda:{order % gpus}") if gpus else torch.device("cpu")
