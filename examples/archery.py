"""A world with a discrete and a continuous action at once: choose a bow, or none, and aim.

Each turn a target stands somewhere, near or far, in some wind. The short bow is right for near ones, the long
bow for far ones, to which the wind carries the arrow. An arrow costs 0.2, the middle of the target pays 1.
Train it with:

rookery train --agents 1 --set world.name=examples.archery:archery --set learner.algorithm=hybrid
"""

import random

from shared.specs import AgentSpec, Continuous, Discrete, vector_observation
from worlds import Copies, agent_ids

SHORT_BOW, LONG_BOW, HOLD = range(3)
ARROW = 0.2
DRIFT = 0.3


class Archery:
    """One range; its archers shoot at targets of their own."""

    def __init__(self, seed: int, agents: int, max_turns: int) -> None:
        self.dice = random.Random(seed)
        self.max_turns = max_turns
        spec = AgentSpec(
            observation=vector_observation(3), discrete=Discrete(n=3), continuous=Continuous(size=1)
        )
        self.specs = dict.fromkeys(agent_ids(agents), spec)
        self.reset()

    def reset(self) -> None:
        self.begin_turn()

    def begin_turn(self) -> None:
        """New targets: direction, whether far, wind."""
        self.targets = {
            agent: (self.dice.uniform(-0.7, 0.7), self.dice.choice((0.0, 1.0)), self.dice.uniform(-1.0, 1.0))
            for agent in self.specs
        }

    def observe(self):
        return self.targets

    def act(self, actions):
        return {agent: (self.reward(agent, action), False) for agent, action in actions.items()}

    def reward(self, agent, action) -> float:
        direction, far, wind = self.targets[agent]
        if action.discrete == HOLD:
            return 0.0
        if action.discrete != (LONG_BOW if far else SHORT_BOW):
            return -ARROW
        miss = abs(float(action.continuous[0]) + DRIFT * wind * far - direction)
        return max(0.0, 1.0 - 2.0 * miss) - ARROW


def archery(envs: int, seed: int, agents: int, max_turns: int) -> Copies:
    """What `world.name` points to."""
    return Copies(lambda own_seed: Archery(own_seed, agents, max_turns), envs, seed)
