"""Algorithms by the names that a config gives them: built-in ones, and a user's own "package.module:Class".

Owns only names. A learner asks for the class that trains, an actor for the network that acts; so an actor
never imports a learner's code, unless a user's own class brings it along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config import LearnerConfig
from shared.errors import ConfigError
from shared.imports import import_named
from shared.networks import PolicyNetwork
from shared.specs import AgentSpec


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Where an algorithm and its network are found."""

    algorithm: str
    network: str


BUILT_IN: Mapping[str, BuiltIn] = {
    "dqn": BuiltIn("services.learner.algorithms.dqn:DQN", "shared.networks.q:QNetwork"),
    "iqn": BuiltIn("services.learner.algorithms.iqn:IQN", "shared.networks.iqn:IQNetwork"),
    "hybrid": BuiltIn("services.learner.algorithms.hybrid:Hybrid", "shared.networks.hybrid:HybridNetwork"),
}


def algorithm_class(name: str) -> Any:
    """The class of an algorithm, with `network` and everything that `Algorithm` has."""
    return _import(BUILT_IN[name].algorithm if name in BUILT_IN else name, name)


def network_class(name: str) -> type[PolicyNetwork]:
    """The network that an agent with this algorithm acts with."""
    if name in BUILT_IN:
        found = _import(BUILT_IN[name].network, name)
    else:
        found = getattr(_import(name, name), "network", None)
    if not (isinstance(found, type) and issubclass(found, PolicyNetwork)):
        raise ConfigError(
            f"learner.algorithm = {name!r} has network = {found!r}: name a subclass of "
            "shared.networks.PolicyNetwork there, or inherit from an algorithm that does"
        )
    return found


def build_network(spec: AgentSpec, config: LearnerConfig) -> PolicyNetwork:
    """The network that an agent acts with, or ConfigError if it cannot act as the spec says."""
    try:
        return network_class(config.algorithm).build(spec, config)
    except ValueError as error:  # for example a spec without a discrete action
        raise ConfigError(f"learner.algorithm = {config.algorithm!r}: {error}") from None


def _import(place: str, name: str) -> Any:
    """The config has seen to it that it names a module and something in it."""
    return import_named(place, f"learner.algorithm = {name!r}", users="learners and actors")
