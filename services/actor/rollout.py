"""Playing: E copies of the world, all agents, one turn at a time. Knows nothing of sockets.

A turn: non-agent entities move, agents observe, all actions are chosen together in one batched pass, the
world applies them one after another. Steps go to each agent's SegmentWriter, and what it cuts is handed out.
Of agents that learn nothing only the returns are kept: their steps are neither recorded nor counted.
An epoch of a slot ends after `max_turns` turns (truncated) or when all its agents are terminated.

Next: services/actor/service.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.actor.exploration import Dice, epsilons, hash_seed, ladder_floors
from services.actor.policies import PolicyGroup, group_agents
from services.actor.scripts import build_scripts
from services.actor.segments import Cut, SegmentWriter
from shared.config import Config
from shared.errors import WorldError
from shared.layout import Array, Arrays
from worlds.base import AgentActions, Outcome, World


@dataclass(slots=True)
class Played:
    """Counts since they were last taken."""

    epochs: int = 0
    env_steps: int = 0
    agent_steps: int = 0  # of agents that learn: what goes to replay
    return_sums: dict[str, float] = field(default_factory=dict)


class Rollout:
    """The worlds, policies and segment writers of one actor."""

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        actor_index: int,
        first_epoch: int,
        groups: Sequence[PolicyGroup] | None = None,
    ) -> None:
        self.config, self.world = config, world
        learning = {agent: spec for agent, spec in world.specs.items() if config.learns(agent)}
        self.groups = groups or group_agents(config, learning, world.envs)
        # As with the dice, a resumed actor does not repeat itself.
        noise = torch.Generator().manual_seed(hash_seed(config.seed, actor_index, first_epoch))
        for group in self.groups:
            group.explore(noise)
        self.group_of = {agent: group for group in self.groups for agent in group.agents}
        self.floors = ladder_floors(config.actor.epsilon, actor_index, world.envs)
        self.writers = {
            agent: SegmentWriter(spec, world.envs, config.segment_steps, config.learner_for(agent).n_step)
            for agent, spec in learning.items()
        }
        self.scripts = build_scripts(
            config, world, seed=config.seed, actor_index=actor_index, first_epoch=first_epoch
        )
        self.dice = {
            agent: Dice(
                seed=config.seed,
                agent=agent,
                actor_index=actor_index,
                first_epoch=first_epoch,
                envs=world.envs,
                spec=spec,
                noise=config.actor.noise.scale,
            )
            for agent, spec in learning.items()
        }
        self.produced_steps = dict.fromkeys(learning, 0)
        self.played = Played(return_sums=dict.fromkeys(world.specs, 0.0))
        self._epoch = np.zeros(world.envs, np.int64)
        self._next_epoch = first_epoch
        self._turns = np.zeros(world.envs, np.int64)
        self._alive = {agent: np.ones(world.envs, np.bool_) for agent in world.specs}
        self._returns = {agent: np.zeros(world.envs) for agent in world.specs}
        self._observations: Mapping[str, Array] = {}
        self._everywhere = np.ones(world.envs, np.bool_)
        self._begin_epochs(self._everywhere)
        self._see(self._everywhere)

    def load(self, agent: str, version: int, tensors: Arrays) -> None:
        """New weights for one agent, from the next turn on."""
        self.group_of[agent].load(agent, version, tensors)

    def turn(self, steps_so_far: float) -> list[tuple[str, Cut]]:
        """Plays one turn in every slot and returns the segments that are complete, with their agents.

        `steps_so_far` counts one agent's steps over all actors and decides how much is explored.
        """
        actions = self._choose(epsilons(self.config.actor.epsilon, self.floors, steps_so_far))
        outcomes = self.world.act(actions)
        truncated = self._turns + 1 >= self.world.max_turns
        for agent, outcome in outcomes.items():
            self._record(agent, actions[agent], outcome, truncated)
        self._turns += 1
        self.played.env_steps += self.world.envs
        # What an agent sees next is needed even where the epoch is over: its last step bootstraps from it.
        self._see(self._everywhere)
        ended = truncated | ~np.logical_or.reduce(list(self._alive.values()))
        cuts = self._cut(ended)
        if ended.any():
            self._end_epochs(ended)
            self._begin_epochs(ended)
            self._see(ended)
        return cuts

    def close(self) -> list[tuple[str, Cut]]:
        """Cuts everything that is open, as at the end of an epoch, without claiming that one ended."""
        return self._cut(self._everywhere)

    # --- a turn, piece by piece -------------------------------------------------------------------------

    def _see(self, slots: npt.NDArray[np.bool_]) -> None:
        """The world of these slots moves on its own, then everyone looks."""
        self.world.begin_turn(slots)
        self._observations = self.world.observe()

    def _choose(self, epsilon: npt.NDArray[np.float64]) -> dict[str, AgentActions]:
        chosen: dict[str, AgentActions] = {}
        for group in self.groups:
            group.observe([self._observations[agent] for agent in group.agents])
            greedy = group.best_actions()
            for place, agent in enumerate(group.agents):
                # An agent without weights yet acts at random.
                own = epsilon if group.versions[place] else np.ones_like(epsilon)
                chosen[agent] = self.dice[agent].roll(greedy[place], own)
        for agent, script in self.scripts.items():
            chosen[agent] = script(self._observations[agent])
        return chosen

    def _record(
        self,
        agent: str,
        actions: AgentActions,
        outcome: Outcome,
        truncated: npt.NDArray[np.bool_],
    ) -> None:
        if not np.isfinite(outcome.reward).all():
            raise WorldError(f"the world gave {agent} a reward that is not finite")
        alive = self._alive[agent]
        if agent in self.writers:
            self._write(agent, actions, outcome, truncated)
        self._returns[agent] += np.where(alive, outcome.reward, 0.0)
        self._alive[agent] = alive & ~outcome.terminated

    def _write(
        self,
        agent: str,
        actions: AgentActions,
        outcome: Outcome,
        truncated: npt.NDArray[np.bool_],
    ) -> None:
        """A step on its way to replay."""
        alive, group = self._alive[agent], self.group_of[agent]
        place = group.agents.index(agent)
        rows = {
            "observation": group.stacks[place, :, -1],  # the world's own array is gone after `act`
            "reward": outcome.reward,
            "terminated": outcome.terminated,
            "truncated": truncated & ~outcome.terminated,
            "turn": self._turns,
            "version": np.full(len(alive), group.versions[place]),
        }
        if actions.discrete is not None:
            rows["action"] = actions.discrete
        if actions.continuous is not None:
            rows["control"] = actions.continuous  # as it was executed: noise and all
        self.writers[agent].add(alive, rows)
        steps = int(alive.sum())
        self.produced_steps[agent] += steps
        self.played.agent_steps += steps

    def _cut(self, ended: npt.NDArray[np.bool_]) -> list[tuple[str, Cut]]:
        cuts: list[tuple[str, Cut]] = []
        for agent, writer in self.writers.items():
            own_end = ended | ~self._alive[agent]
            for cut in writer.cut(own_end, self._observations[agent]):
                if not np.isfinite(cut.arrays["observation"]).all():  # no learner could train on it, ever
                    raise WorldError(f"the world gave {agent} an observation that is not finite")
                cuts.append((agent, cut))
        return cuts

    # --- epochs -----------------------------------------------------------------------------------------

    def _begin_epochs(self, slots: npt.NDArray[np.bool_]) -> None:
        count = int(slots.sum())
        self._epoch[slots] = self._next_epoch + np.arange(count)
        self._next_epoch += count
        self._turns[slots] = 0
        self.world.reset(slots)
        self.world.on_epoch_start(slots, self._epoch)
        for group in self.groups:
            group.forget(slots)
        for writer in self.writers.values():
            writer.begin(slots, self._epoch)
        for agent in self.world.specs:
            self._alive[agent][slots] = True
            self._returns[agent][slots] = 0.0

    def _end_epochs(self, slots: npt.NDArray[np.bool_]) -> None:
        self.world.on_epoch_end(slots, self._epoch)
        self.played.epochs += int(slots.sum())
        for agent, returns in self._returns.items():
            self.played.return_sums[agent] += float(returns[slots].sum())
