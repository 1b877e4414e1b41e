"""When an agent acts at random: the epsilon ladder, and noise on continuous actions, with fixed seeds."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from shared.config import EpsilonConfig
from shared.specs import AgentSpec
from worlds.base import AgentActions

_BLOCK_TURNS = 128  # random numbers are drawn for this many turns at once


def ladder_floors(config: EpsilonConfig, actor_index: int, envs: int) -> npt.NDArray[np.float64]:
    """Each slot's final epsilon: base^(1 + spread * position), positions spread evenly over the slots.

    Actors shift their positions by a van der Corput sequence, so that any number of them fills the ladder
    evenly without knowing how many there are.
    """
    positions = (np.arange(envs) + radical_inverse(actor_index)) / envs
    floors: npt.NDArray[np.float64] = config.base ** (1.0 + config.spread * positions)
    return floors


def radical_inverse(index: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, ...: the bits of the index behind the point."""
    value, weight = 0.0, 0.5
    while index:
        value += weight * (index & 1)
        index >>= 1
        weight /= 2
    return value


def epsilons(config: EpsilonConfig, floors: npt.NDArray[np.float64], steps: float) -> npt.NDArray[np.float64]:
    """Epsilon of each slot after `steps` steps of an agent: linear from start to the slot's floor."""
    progress = min(1.0, steps / config.decay_steps)
    return config.start + progress * (floors - config.start)


class Dice:
    """The random choices of one agent in one actor's slots, fixed by its seed, agent and actor.

    `noise` is the deviation of what is added to a greedy control, in shares of half its range.
    """

    def __init__(
        self,
        *,
        seed: int,
        agent: str,
        actor_index: int,
        first_epoch: int,
        envs: int,
        spec: AgentSpec,
        noise: float,
    ) -> None:
        # The epoch at which the actor joined is part of the seed: a resumed actor does not repeat itself.
        key = [seed, zlib.crc32(agent.encode()), actor_index, first_epoch]
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
        self._envs, self._spec, self._noise = envs, spec, noise
        self._at = _BLOCK_TURNS

    def roll(self, greedy: AgentActions, epsilon: npt.NDArray[np.float64]) -> AgentActions:
        """With probability epsilon any action, whole; else the greedy one, its continuous part with noise."""
        if self._at == _BLOCK_TURNS:
            self._draw_block()
        random, discrete, continuous = self._chances[self._at] < epsilon, None, None
        if self._spec.discrete is not None:
            assert greedy.discrete is not None
            discrete = np.where(random, self._choices[self._at], greedy.discrete)
        if self._spec.continuous is not None:
            assert greedy.continuous is not None
            continuous = self._roll_control(greedy.continuous, random)
        self._at += 1
        return AgentActions(discrete, continuous)

    def _draw_block(self) -> None:
        self._chances = self._generator.random((_BLOCK_TURNS, self._envs))
        if self._spec.discrete is not None:
            self._choices = self._generator.integers(self._spec.discrete.n, size=(_BLOCK_TURNS, self._envs))
        self._at = 0

    def _roll_control(
        self, greedy: npt.NDArray[np.float32], random: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
        """Both kinds of numbers are drawn whatever is needed, so that the next ones do not depend on it."""
        control = self._spec.continuous
        assert control is not None
        size = (self._envs, control.size)
        anywhere = control.low + (control.high - control.low) * self._generator.random(size, np.float32)
        noise = (
            self._noise * (control.high - control.low) / 2 * self._generator.standard_normal(size, np.float32)
        )
        chosen = np.where(random[:, None], anywhere, greedy + noise)
        return np.clip(chosen, control.low, control.high)


def hash_seed(*parts: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0])
