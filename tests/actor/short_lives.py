"""A world whose agents die at moments of their own: epochs end early, rounds in the middle of one."""

from __future__ import annotations

import random
from collections.abc import Mapping

from shared.specs import AgentSpec, Discrete, vector_observation
from worlds import Copies, agent_ids
from worlds.base import AgentActions


class ShortLives:
    """Each turn an agent dies with probability 1/8; the epoch ends with the last of them."""

    def __init__(self, seed: int, agents: int, max_turns: int) -> None:
        self.dice, self.max_turns = random.Random(seed), max_turns
        spec = AgentSpec(observation=vector_observation(3), stack=3, discrete=Discrete(n=2))
        self.specs = dict.fromkeys(agent_ids(agents), spec)
        self.turn, self.luck = 0, 0.0

    def reset(self) -> None:
        self.turn, self.luck = 0, self.dice.random()

    def begin_turn(self) -> None:
        self.luck = self.dice.random()

    def observe(self) -> dict[str, list[float]]:
        return {agent: [self.turn / 10, self.luck, float(place)] for place, agent in enumerate(self.specs)}

    def act(self, actions: Mapping[str, AgentActions]) -> dict[str, tuple[float, bool]]:
        self.turn += 1
        return {
            agent: (float(action.discrete == (self.luck > 0.5)), self.dice.random() < 1 / 8)
            for agent, action in actions.items()
        }


def short_lives(envs: int, seed: int, agents: int, max_turns: int) -> Copies:
    """What `world.name` points to."""
    return Copies(lambda own_seed: ShortLives(own_seed, agents, max_turns), envs, seed)
