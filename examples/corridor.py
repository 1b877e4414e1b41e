"""A world of one's own, as short as it gets: two agents in a corridor, each paid at its own end.

Train it with: rookery train --set world.name=examples.corridor:corridor --agents 2 --set world.max_turns=20
"""

import random

from shared.specs import AgentSpec, Discrete, vector_observation
from worlds import Copies, agent_ids

LENGTH = 9


class Corridor:
    """One environment. Rookery makes as many copies as `actor.envs` says, each with its own seed."""

    def __init__(self, seed: int, agents: int, max_turns: int) -> None:
        self.dice = random.Random(seed)
        self.max_turns = max_turns
        spec = AgentSpec(observation=vector_observation(LENGTH), discrete=Discrete(n=2))
        self.specs = dict.fromkeys(agent_ids(agents), spec)
        self.places = dict.fromkeys(self.specs, 0)

    def reset(self) -> None:
        self.places = {agent: self.dice.randrange(LENGTH) for agent in self.specs}

    def begin_turn(self) -> None:
        """Nothing moves by itself here."""

    def observe(self):
        return {
            agent: [float(cell == place) for cell in range(LENGTH)] for agent, place in self.places.items()
        }

    def act(self, actions):
        results = {}
        for number, (agent, action) in enumerate(actions.items()):
            self.places[agent] = min(LENGTH - 1, max(0, self.places[agent] + (1 if action.discrete else -1)))
            goal = 0 if number % 2 else LENGTH - 1
            results[agent] = (float(self.places[agent] == goal), False)  # reward, terminated
        return results


def corridor(envs: int, seed: int, agents: int, max_turns: int) -> Copies:
    """What `world.name` points to."""
    return Copies(lambda own_seed: Corridor(own_seed, agents, max_turns), envs, seed)
