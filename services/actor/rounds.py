"""Playing in rounds, for lockstep and sequential mode: each round is a pure function of its number.

World, epochs and dice are made anew for every round from (seed, actor, round); only the policies stay. So an
actor keeps nothing from one round to the next, and any process can play any round. At the end of a round
every segment is closed; they leave by (environment slot, time), the order in which replay takes them.
"""

from __future__ import annotations

from services.actor.exploration import hash_seed
from services.actor.policies import group_agents
from services.actor.rollout import Played, Rollout
from services.actor.scripts import try_scripts
from services.actor.segments import Cut
from shared.config import Config
from shared.layout import Arrays
from shared.schedule import Schedule
from worlds.base import World
from worlds.registry import build_world


def round_world(config: Config, actor_index: int, number: int) -> World:
    """The world of one actor in one round."""
    return build_world(config.world, config.actor.envs, hash_seed(config.seed, actor_index, number))


class RoundPlayer:
    """One actor's rounds."""

    def __init__(self, config: Config, actor_index: int) -> None:
        self._config, self._index = config, actor_index
        self._schedule = Schedule.of(config)
        world = round_world(config, actor_index, 0)
        self.specs = world.specs
        try_scripts(config, world)
        learning = {agent: spec for agent, spec in world.specs.items() if config.learns(agent)}
        self._groups = group_agents(config, learning, world.envs)
        self._group_of = {agent: group for group in self._groups for agent in group.agents}
        self._rollout: Rollout | None = None
        self._number = self._turn = 0
        self._cuts: list[tuple[str, Cut]] = []
        self.produced_steps = dict.fromkeys(learning, 0)  # in rounds that are over

    def load(self, agent: str, version: int, tensors: Arrays) -> None:
        """The weights that an agent plays the next round with."""
        self._group_of[agent].load(agent, version, tensors)

    def begin(self, number: int) -> None:
        self._number, self._turn, self._cuts = number, 0, []
        self._rollout = Rollout(
            self._config,
            round_world(self._config, self._index, number),
            actor_index=self._index,
            first_epoch=self._schedule.first_epoch(number, self._index),
            groups=self._groups,
        )

    @property
    def playing(self) -> bool:
        return self._rollout is not None

    def turn(self) -> bool:
        """One turn in every slot; False when it was the round's last."""
        assert self._rollout is not None
        self._cuts += self._rollout.turn(self._schedule.steps_before(self._number, self._turn))
        self._turn += 1
        return self._turn < self._config.world.max_turns

    def end(self) -> tuple[dict[str, list[Cut]], Played]:
        """Each agent's segments of the round in their order, and what was played."""
        assert self._rollout is not None
        rollout, self._rollout = self._rollout, None
        cuts = [*self._cuts, *rollout.close()]
        segments: dict[str, list[Cut]] = {agent: [] for agent in rollout.writers}
        for agent, cut in sorted(cuts, key=lambda cut: cut[1].slot):  # stable: in a slot by time
            segments[agent].append(cut)
        for agent, steps in rollout.produced_steps.items():
            self.produced_steps[agent] += steps
        return segments, rollout.played

    def play(self, number: int) -> tuple[dict[str, list[Cut]], Played]:
        """A whole round at once."""
        self.begin(number)
        while self.turn():
            pass
        return self.end()
