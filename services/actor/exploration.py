"""When an agent acts at random: the epsilon ladder, and random numbers that are fixed per agent and actor."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from shared.config import EpsilonConfig

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
    """The random choices of one agent in one actor's slots."""

    def __init__(
        self, *, seed: int, agent: str, actor_index: int, first_epoch: int, envs: int, actions: int
    ) -> None:
        # The epoch at which the actor joined is part of the seed: a resumed actor does not repeat itself.
        key = [seed, zlib.crc32(agent.encode()), actor_index, first_epoch]
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
        self._envs, self._actions = envs, actions
        self._at = _BLOCK_TURNS

    def roll(self, greedy: npt.NDArray[np.int64], epsilon: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The greedy action of each slot, or with probability epsilon any action."""
        if self._at == _BLOCK_TURNS:
            self._chances = self._generator.random((_BLOCK_TURNS, self._envs))
            self._choices = self._generator.integers(self._actions, size=(_BLOCK_TURNS, self._envs))
            self._at = 0
        chosen = np.where(self._chances[self._at] < epsilon, self._choices[self._at], greedy)
        self._at += 1
        return chosen


def hash_seed(*parts: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0])
