"""Yardsticks for treasure hunt: what an agent gets that walks at random, or to the nearest gem it sees.

Both see only what a network would be given (the newest frame), so their returns say how much a trained agent
learned. `mean_return` plays whole epochs with one policy for all agents.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from worlds.base import ActionArray, AgentActions, Array, BoolArray
from worlds.treasure_hunt import (
    DOWN,
    EMPTY,
    FIRST_ITEM,
    LEFT,
    RIGHT,
    STEPS,
    UP,
    TreasureHunt,
    TreasureHuntRules,
)


class Policy(Protocol):
    """Chooses one action for each row of observations."""

    def __call__(self, observations: Array) -> ActionArray: ...


class RandomPolicy:
    """Every action with equal odds."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def __call__(self, observations: Array) -> ActionArray:
        return self._rng.integers(len(STEPS), size=len(observations), dtype=np.int64)


class NearestItemPolicy:
    """Walks to the nearest visible item that pays (in steps; ties at random).

    Where it sees none it takes a random step onto a free cell, never into a wall or another agent.
    """

    def __init__(self, rules: TreasureHuntRules, seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._channels = rules.channels
        self._wanted = [FIRST_ITEM + kind for kind, pays in enumerate(rules.items.values()) if pays > 0]
        reach = np.arange(-rules.view, rules.view + 1)
        rows, columns = np.meshgrid(reach, reach, indexing="ij")
        self._rows, self._columns = rows.reshape(-1), columns.reshape(-1)
        width = 2 * rules.view + 1
        center = self._rows.size // 2
        self._neighbours = [center + row * width + column for row, column in STEPS]

    def __call__(self, observations: Array) -> ActionArray:
        cells = observations.reshape(len(observations), -1, self._channels)  # [E, window, channels]
        wanted: BoolArray = (cells[:, :, self._wanted] != 0).any(axis=2)
        return np.where(wanted.any(axis=1), self._towards_nearest(wanted), self._wander(cells))

    def _towards_nearest(self, wanted: BoolArray) -> ActionArray:
        ties = self._rng.random(wanted.shape)
        steps = np.abs(self._rows) + np.abs(self._columns) + ties
        nearest = np.where(wanted, steps, np.inf).argmin(axis=1)
        rows, columns = self._rows[nearest], self._columns[nearest]
        either = self._rng.random(len(rows)) < 0.5
        vertical = (rows != 0) & ((columns == 0) | either)
        return np.where(vertical, np.where(rows < 0, UP, DOWN), np.where(columns < 0, LEFT, RIGHT))

    def _wander(self, cells: Array) -> ActionArray:
        free = cells[:, self._neighbours, EMPTY]  # [E, actions]
        preference: Array = free + self._rng.random(free.shape)
        chosen: ActionArray = preference.argmax(axis=1)
        return chosen


def mean_return(world: TreasureHunt, policy: Policy, epochs: int) -> float:
    """The mean return per agent and epoch when every agent follows this policy, over at least `epochs`."""
    everywhere = np.ones(world.envs, dtype=np.bool_)
    rounds = -(-epochs // world.envs)
    total = 0.0
    for _ in range(rounds):
        world.reset(everywhere)
        total += sum(_play_turn(world, policy) for _ in range(world.max_turns))
    return total / (rounds * world.envs * len(world.specs))


def _play_turn(world: TreasureHunt, policy: Policy) -> float:
    world.begin_turn(np.ones(world.envs, np.bool_))
    seen = world.observe()
    outcomes = world.act({agent: AgentActions(discrete=policy(rows)) for agent, rows in seen.items()})
    return float(sum(outcome.reward.sum() for outcome in outcomes.values()))
