"""Greedy play: whole epochs with fixed weights, nothing explored, nothing recorded (MISSION A7).

Agents that learn nothing play as they always do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.actor.policies import PolicyGroup, group_agents
from services.actor.scripts import build_scripts
from shared.config import Config
from shared.layout import Arrays
from worlds.base import AgentActions, Script, World
from worlds.registry import build_world

MOST_ENVS = 100


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """One agent's weights at one version."""

    version: int
    tensors: Arrays


def greedy_returns(
    config: Config, weights: Mapping[str, PolicyWeights], episodes: int, seed: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Each agent's return in each of `episodes` greedy epochs; agents that learn need weights."""
    envs = min(episodes, MOST_ENVS)
    world = build_world(config.world, envs, seed)
    groups = group_agents(config, {agent: world.specs[agent] for agent in weights}, envs)
    scripts = build_scripts(config, world, seed=seed, actor_index=0, first_epoch=0)
    for group in groups:
        for agent in group.agents:
            group.load(agent, weights[agent].version, weights[agent].tensors)
    rounds = [_one_round(world, groups, scripts) for _ in range(-(-episodes // envs))]
    return {agent: np.concatenate([played[agent] for played in rounds])[:episodes] for agent in world.specs}


def _one_round(
    world: World, groups: list[PolicyGroup], scripts: Mapping[str, Script]
) -> dict[str, npt.NDArray[np.float64]]:
    everywhere = np.ones(world.envs, np.bool_)
    world.reset(everywhere)
    for group in groups:
        group.forget(everywhere)
    returns = {agent: np.zeros(world.envs) for agent in world.specs}
    alive = {agent: everywhere.copy() for agent in world.specs}
    for _ in range(world.max_turns):
        world.begin_turn(everywhere)
        for agent, outcome in world.act(_greedy_actions(world, groups, scripts)).items():
            returns[agent] += np.where(alive[agent], outcome.reward, 0.0)
            alive[agent] &= ~outcome.terminated
    return returns


def _greedy_actions(
    world: World, groups: list[PolicyGroup], scripts: Mapping[str, Script]
) -> dict[str, AgentActions]:
    observations = world.observe()
    actions: dict[str, AgentActions] = {}
    for group in groups:
        group.observe([observations[agent] for agent in group.agents])
        actions.update(zip(group.agents, group.best_actions(), strict=True))
    for agent, script in scripts.items():
        actions[agent] = script(observations[agent])
    return actions
