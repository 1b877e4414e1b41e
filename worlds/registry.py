"""From the `world` section of the config to a world that can be played.

Owns the names of the built-in worlds, the import of others by "package.module:factory", and the errors that
say in words why a world cannot be built. A world from outside is looked at closely, and one turn of it is
played, before anything trains on it (`check_world`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shared.config import WorldConfig
from shared.errors import ConfigError, WorldError
from shared.imports import import_named, is_place, nearest
from shared.specs import AgentSpec
from worlds.base import AgentActions, Outcome, World, agent_ids
from worlds.treasure_hunt import TreasureHunt

Factory = Callable[..., Any]

BUILT_IN: Mapping[str, Factory] = {"treasure_hunt": TreasureHunt}

# What every factory is given besides the options, and where it is set.
GIVEN = {"envs": "actor.envs", "seed": "seed", "agents": "world.agents", "max_turns": "world.max_turns"}

_NO_DEFAULT = inspect.Parameter.empty
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def build_world(config: WorldConfig, envs: int, seed: int) -> World:
    """The world that the config names, with `envs` slots; ConfigError or WorldError if that cannot be."""
    factory = BUILT_IN.get(config.name) or _imported(config.name)
    _check_options(config, factory)
    world = factory(envs=envs, seed=seed, agents=config.agents, max_turns=config.max_turns, **config.options)
    if config.name in BUILT_IN:
        assert isinstance(world, World)
        return world
    return check_world(world, config, envs)


def _imported(name: str) -> Factory:
    if not is_place(name):
        raise ConfigError(
            f"world.name = {name!r}: no built-in world has this name{nearest(name, BUILT_IN)} "
            f'Known are {", ".join(BUILT_IN)}; a world of your own is written "package.module:factory"'
        )
    factory = import_named(
        name,
        f"world.name = {name!r}",
        users="every service that plays",
        wanted="Name a function or class that returns a World",
    )
    if not callable(factory):
        raise ConfigError(f"world.name = {name!r} is a {type(factory).__name__}, not a function or class")
    return factory  # type: ignore[no-any-return]


def _check_options(config: WorldConfig, factory: Factory) -> None:
    """Refuses options that the factory does not take, before it is called with them."""
    parameters = _parameters(config.name, factory)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind in _BY_NAME}
    refused = [key for key in GIVEN if key not in named and not takes_any]
    if refused:
        raise WorldError(
            f"{config.name} does not take {', '.join(refused)}: a factory is called with "
            f"{', '.join(GIVEN)} and the options, all by name"
        )
    known = [key for key in named if key not in GIVEN]
    for key in config.options:
        _check_option(config.name, key, known, takes_any)
    missing = [key for key in known if named[key].default is _NO_DEFAULT and key not in config.options]
    if missing:
        raise ConfigError(f"{config.name} needs a value for world.options.{missing[0]}")


def _check_option(world_name: str, key: str, known: list[str], takes_any: bool) -> None:
    if key in GIVEN:
        raise ConfigError(f"world.options.{key} is no option: set {GIVEN[key]} instead")
    if key not in known and not takes_any:
        listed = f"It knows {', '.join(known)}" if known else "It has no options"
        raise ConfigError(
            f"world.options.{key}: {world_name} has no such option{nearest(key, known)} {listed}"
        )


def _parameters(name: str, factory: Factory) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:
        raise WorldError(
            f"the parameters of {name} cannot be read: wrap it in a plain function that returns a World"
        ) from None


def check_world(world: object, config: WorldConfig, envs: int) -> World:
    """`world`, if it is one and does what its specs say; it has played one turn then and needs a reset."""
    if not isinstance(world, World):
        raise WorldError(
            f"{config.name} returned a {type(world).__name__}, not a World: subclass worlds.World, "
            "or wrap an ordinary environment in worlds.Copies"
        )
    _check_attributes(world, config, envs)
    world.reset(np.ones(envs, dtype=np.bool_))
    world.begin_turn(np.ones(world.envs, np.bool_))
    _check_observations(world, config.name)
    _check_outcomes(world, config.name)
    return world


def _check_attributes(world: World, config: WorldConfig, envs: int) -> None:
    expected_values = {"envs": envs, "max_turns": config.max_turns}
    for key, expected in expected_values.items():
        found = getattr(world, key, None)
        if found != expected:
            raise WorldError(f"{config.name} has {key} = {found!r}, but was built with {key} = {expected}")
    specs = getattr(world, "specs", None)
    if not isinstance(specs, Mapping):
        raise WorldError(
            f"{config.name} has specs = {specs!r}: expected a mapping from agent id to AgentSpec"
        )
    if tuple(specs) != agent_ids(config.agents):
        raise WorldError(
            f"{config.name} has specs for {list(specs)}, but world.agents = {config.agents} means "
            f"{list(agent_ids(config.agents))}, in acting order: change world.agents or the world"
        )
    for agent, spec in specs.items():
        if not isinstance(spec, AgentSpec):
            raise WorldError(
                f"{config.name}: the spec of {agent} is a {type(spec).__name__}, not an AgentSpec"
            )


def _check_observations(world: World, name: str) -> None:
    seen = world.observe()
    _check_agents(f"{name}: observe()", seen, world)
    for agent, spec in world.specs.items():
        shape = (world.envs, *spec.observation.shape)
        _check_array(f"{name}: the observation of {agent}", seen[agent], spec.observation.dtype.numpy, shape)


def _check_outcomes(world: World, name: str) -> None:
    outcomes = world.act({agent: _idle(spec, world.envs) for agent, spec in world.specs.items()})
    _check_agents(f"{name}: act()", outcomes, world)
    for agent, outcome in outcomes.items():
        if not isinstance(outcome, Outcome):
            raise WorldError(f"{name}: act() gave {agent} a {type(outcome).__name__}, not an Outcome")
        _check_array(f"{name}: the reward of {agent}", outcome.reward, np.dtype(np.float32), (world.envs,))
        _check_array(f"{name}: terminated of {agent}", outcome.terminated, np.dtype(np.bool_), (world.envs,))


def _idle(spec: AgentSpec, envs: int) -> AgentActions:
    """An action that every spec allows: the first choice, and as near to zero as the bounds let it be."""
    control = spec.continuous
    return AgentActions(
        discrete=None if spec.discrete is None else np.zeros(envs, dtype=np.int64),
        continuous=None
        if control is None
        else np.full((envs, control.size), np.clip(0.0, control.low, control.high), dtype=np.float32),
    )


def _check_agents(what: str, answer: object, world: World) -> None:
    if not isinstance(answer, Mapping) or answer.keys() != world.specs.keys():
        found = list(answer) if isinstance(answer, Mapping) else type(answer).__name__
        raise WorldError(f"{what} returned {found}, not one entry for each of {list(world.specs)}")


def _check_array(what: str, value: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not isinstance(value, np.ndarray):
        raise WorldError(f"{what} is a {type(value).__name__}, not an array {dtype}{list(shape)}")
    if value.dtype != dtype or value.shape != shape:
        raise WorldError(f"{what} is {value.dtype}{list(value.shape)}, but should be {dtype}{list(shape)}")
