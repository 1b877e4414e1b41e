"""Agents that learn nothing: random ones, and those that follow a script of the user's or of the world's.

Such an agent plays with the others and its returns are counted; it has no network, no learner, no buffer and
no weights. A script sees what a network would be given, the newest frame only, of all slots at once. Each
actor builds its own, with a seed of its own; before anything is played another one is tried on one turn.
"""

from __future__ import annotations

import inspect
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.actor.exploration import Dice, hash_seed
from shared.config import Config
from shared.errors import ConfigError, RookeryError, WorldError
from shared.imports import import_named, is_place
from shared.layout import Array
from shared.logs import get_logger
from shared.specs import AgentSpec
from worlds.base import AgentActions, Script, World

log = get_logger()


def build_scripts(
    config: Config, world: World, *, seed: int, actor_index: int, first_epoch: int
) -> dict[str, Script]:
    """What each agent does that has no learner; ConfigError if a script cannot be had."""
    scripts: dict[str, Script] = {}
    for agent, spec in world.specs.items():
        if config.learns(agent):
            continue
        if config.algorithm_of(agent) == "random":
            dice = Dice(
                seed=seed,
                agent=agent,
                actor_index=actor_index,
                first_epoch=first_epoch,
                envs=world.envs,
                spec=spec,
                noise=0.0,
            )
            scripts[agent] = RandomScript(dice, spec, world.envs)
        else:
            own_seed = (
                hash_seed(seed, zlib.crc32(agent.encode()), actor_index, first_epoch) >> 1
            )  # fits int64
            script = _scripted(config, world, agent, own_seed)
            scripts[agent] = CheckedScript(script, agent, spec, world.envs)
    return scripts


def try_scripts(config: Config, world: World) -> None:
    """One turn with scripts that are thrown away, before anything is played; the world needs a reset then."""
    if all(config.algorithm_of(agent) != "scripted" for agent in world.specs):
        return
    everywhere = np.ones(world.envs, np.bool_)
    world.reset(everywhere)
    world.begin_turn(everywhere)
    observations = world.observe()
    for agent, script in build_scripts(config, world, seed=config.seed, actor_index=0, first_epoch=0).items():
        try:
            script(observations[agent])
        except RookeryError as error:
            raise ConfigError(str(error)) from error  # starting the actor again would not help
        except Exception as error:
            log.exception("a script failed on its first turn", agent=agent)
            raise ConfigError(
                f"{_setting(config, agent)} raised {_words(error)} on its first turn"
            ) from error


class RandomScript:
    """Every choice with equal odds, every continuous value evenly between its bounds."""

    def __init__(self, dice: Dice, spec: AgentSpec, envs: int) -> None:
        control = spec.continuous
        self._dice = dice
        self._always = np.ones(envs)
        self._never_chosen = AgentActions(
            discrete=None if spec.discrete is None else np.zeros(envs, np.int64),
            continuous=None if control is None else np.zeros((envs, control.size), np.float32),
        )

    def __call__(self, _observations: Array) -> AgentActions:
        return self._dice.roll(self._never_chosen, self._always)


class CheckedScript:
    """A script whose every answer is looked at: a wrong one is named, not passed on to the world."""

    def __init__(self, script: Script, agent: str, spec: AgentSpec, envs: int) -> None:
        self._script, self._agent, self._spec, self._envs = script, agent, spec, envs

    def __call__(self, observations: Array) -> AgentActions:
        actions = self._script(observations)
        if problem := _problem(actions, self._spec, self._envs):
            raise WorldError(f"the script of {self._agent} {problem}")
        return actions


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one part of an agent's actions must be."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    low: float
    high: float


def _problem(actions: object, spec: AgentSpec, envs: int) -> str:
    """What is wrong with a script's answer, as the end of a sentence; empty: nothing."""
    if not isinstance(actions, AgentActions):
        return f"returned a {type(actions).__name__}, not worlds.AgentActions"
    choice, control = spec.discrete, spec.continuous
    choices = None if choice is None else _Wanted(np.dtype(np.int64), (envs,), 0, choice.n - 1)
    controls = (
        None
        if control is None
        else _Wanted(np.dtype(np.float32), (envs, control.size), control.low, control.high)
    )
    return _part_problem("discrete", actions.discrete, choices) or _part_problem(
        "continuous", actions.continuous, controls
    )


def _part_problem(name: str, found: object, wanted: _Wanted | None) -> str:
    if wanted is None:
        return "" if found is None else f"returned {name} actions, which its spec does not have"
    expected = f"{wanted.dtype}{list(wanted.shape)}"
    if not isinstance(found, np.ndarray):
        return f"returned {name} actions that are a {type(found).__name__}, not {expected}"
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"returned {name} actions that are {found.dtype}{list(found.shape)}, not {expected}"
    inside = (found >= wanted.low) & (found <= wanted.high)  # false for what is not a number, too
    if not inside.all():
        return f"chose the {name} action {found[~inside][0]}, which is not in {wanted.low} to {wanted.high}"
    return ""


# --- scripts by name --------------------------------------------------------------------------------------


def _scripted(config: Config, world: World, agent: str, seed: int) -> Script:
    place, setting = config.learner_for(agent).script, _setting(config, agent)
    if not place:
        return world.script_for(agent, seed)
    if not is_place(place):
        raise ConfigError(f'{setting}: a script is written "package.module:factory"')
    factory = import_named(place, setting, users="every service that plays")
    _check_factory(factory, setting)
    try:
        script = factory(spec=world.specs[agent], agent=agent, seed=seed)
    except RookeryError:
        raise
    except Exception as error:
        log.exception("a script could not be built", agent=agent)
        raise ConfigError(f"{setting} raised {_words(error)}") from error
    if not callable(script):
        raise ConfigError(
            f"{setting} returned a {type(script).__name__}: expected something that is called with "
            "observations [E, *shape] and returns worlds.AgentActions"
        )
    return script  # type: ignore[no-any-return]


def _check_factory(factory: object, setting: str) -> None:
    if not callable(factory):
        raise ConfigError(f"{setting} is a {type(factory).__name__}, not a function or class")
    try:
        inspect.signature(factory).bind(spec=None, agent="", seed=0)
    except ValueError:
        return  # its parameters cannot be read; calling it will tell
    except TypeError as error:
        raise ConfigError(
            f"{setting}: {error}; a factory of scripts is called with spec, agent and seed, all by name"
        ) from None


def _setting(config: Config, agent: str) -> str:
    """The key that named the agent's script, and its value."""
    own = "script" in config.agents.get(agent, {})
    return f"{f'agents.{agent}' if own else 'learner'}.script = {config.learner_for(agent).script!r}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
