"""The schedule of a run in rounds: what lockstep and sequential mode agree on, as pure arithmetic.

In round r every actor plays one epoch in each of its environments; then phase r trains on it. Version 1 of an
agent's weights is its first, phase r makes version r + 2. A round is played with the weights of the phase
before it (`lag_rounds` 0) or the one before that (1: a round is played while the last one is trained on).
Everything random in a round is a function of (seed, actor, round), so a round can be played again anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import Config


@dataclass(frozen=True, slots=True)
class Schedule:
    """The numbers of one run."""

    actors: int
    envs: int
    max_turns: int
    agents: int  # that learn
    lag_rounds: int
    agent_steps: int | None

    @classmethod
    def of(cls, config: Config) -> Schedule:
        return cls(
            actors=config.actor.count,
            envs=config.actor.envs,
            max_turns=config.world.max_turns,
            agents=len(config.learning_agents),
            lag_rounds=config.parallel.lag_rounds,
            agent_steps=config.run.agent_steps,
        )

    @property
    def round_steps(self) -> int:
        """One agent's steps in a round in which nobody terminates."""
        return self.actors * self.envs * self.max_turns

    @property
    def rounds(self) -> int | None:
        """How many rounds the run has; None: no limit but time."""
        if self.agent_steps is None:
            return None
        return -(-self.agent_steps // (self.round_steps * self.agents))

    def version_for(self, number: int) -> int:
        """The version that a round is played with."""
        return max(1, number + 1 - self.lag_rounds)

    def steps_before(self, number: int, turn: int) -> int:
        """One agent's steps over all actors before this turn of a round; decides how much is explored."""
        return (number * self.max_turns + turn) * self.actors * self.envs

    def first_epoch(self, number: int, actor_index: int) -> int:
        """The number of the epoch that the actor's slot 0 begins the round with."""
        return (number * self.actors + actor_index) * self.envs


def version_after(phase: int) -> int:
    """The version that a phase makes."""
    return phase + 2


def phases_done(version: int) -> int:
    """How many phases an agent with this newest version has behind it; also the next round to be stored."""
    return max(0, version - 1)
