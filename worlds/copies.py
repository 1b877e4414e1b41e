"""Makes a World of many independent copies of an ordinary, non-vectorised one.

Owns the copies, their seeds and the stacking of what they return. A user writes a class that does what
`SingleWorld` says and a factory `return Copies(MyWorld, envs, seed)`; each copy is made with its own seed.
It loops over copies in Python: right for a world that is slow by itself or quickly written; a world on the
hot path is better written as a `World` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from shared.errors import WorldError
from shared.specs import AgentSpec, Column
from worlds.base import AgentActions, Array, BoolArray, FloatArray, Outcome, World


@dataclass(frozen=True, slots=True)
class SingleAction:
    """What one agent does in one copy; a part that its spec does not have is None."""

    discrete: int | None = None
    continuous: FloatArray | None = None  # [size]


class SingleWorld(Protocol):
    """One environment with plain values instead of arrays over slots. Every answer names every agent."""

    @property
    def specs(self) -> Mapping[str, AgentSpec]: ...
    @property
    def max_turns(self) -> int: ...
    def reset(self) -> None: ...
    def begin_turn(self) -> None: ...
    def observe(self) -> Mapping[str, ArrayLike]: ...
    def act(self, actions: Mapping[str, SingleAction]) -> Mapping[str, tuple[float, bool]]:
        """The reward of each agent and whether it terminated."""
        ...


class Copies(World):
    """`envs` copies, each made by `make(seed)` with a seed of its own. Returned arrays are fresh."""

    def __init__(self, make: Callable[[int], SingleWorld], envs: int, seed: int) -> None:
        if envs < 1:
            raise WorldError(f"envs = {envs}: at least one copy is needed")
        seeds = np.random.SeedSequence(seed).generate_state(envs, np.uint64) >> np.uint64(1)  # fits int64
        self._copies = [make(int(own_seed)) for own_seed in seeds]
        first = self._copies[0]
        self.envs = envs
        self.specs = dict(first.specs)
        self.max_turns = first.max_turns
        self._check_alike()

    def _check_alike(self) -> None:
        for index, copy in enumerate(self._copies):
            if list(copy.specs.items()) != list(self.specs.items()) or copy.max_turns != self.max_turns:
                raise WorldError(
                    f"copy {index} has other specs or max_turns than copy 0: "
                    "they must not depend on the seed, since one network plays all copies"
                )

    def reset(self, slots: BoolArray) -> None:
        for slot in np.flatnonzero(slots):
            self._copies[slot].reset()

    def begin_turn(self, slots: BoolArray) -> None:
        for slot in np.flatnonzero(slots):
            self._copies[slot].begin_turn()

    def observe(self) -> dict[str, Array]:
        seen = {
            agent: np.empty((self.envs, *spec.observation.shape), dtype=spec.observation.dtype.numpy)
            for agent, spec in self.specs.items()
        }
        for slot, copy in enumerate(self._copies):
            answer = copy.observe()
            self._check_agents("observe", slot, answer)
            for agent, rows in seen.items():
                rows[slot] = _fitting(answer[agent], self.specs[agent].observation, f"{agent} in copy {slot}")
        return seen

    def act(self, actions: Mapping[str, AgentActions]) -> dict[str, Outcome]:
        outcomes = {
            agent: Outcome(np.empty(self.envs, dtype=np.float32), np.empty(self.envs, dtype=np.bool_))
            for agent in self.specs
        }
        for slot, copy in enumerate(self._copies):
            answer = copy.act({agent: _single(actions[agent], slot) for agent in self.specs})
            self._check_agents("act", slot, answer)
            for agent, outcome in outcomes.items():
                outcome.reward[slot], outcome.terminated[slot] = answer[agent]
        return outcomes

    def _check_agents(self, method: str, slot: int, answer: Mapping[str, object]) -> None:
        if answer.keys() != self.specs.keys():
            raise WorldError(
                f"{method}() of copy {slot} answered for {sorted(answer)}, not for {sorted(self.specs)}: "
                "name every agent each time, terminated ones too"
            )


def _single(actions: AgentActions, slot: int) -> SingleAction:
    return SingleAction(
        discrete=None if actions.discrete is None else int(actions.discrete[slot]),
        continuous=None if actions.continuous is None else actions.continuous[slot],
    )


def _fitting(value: ArrayLike, column: Column, whose: str) -> Array:
    """The observation as an array; numpy would otherwise stretch a wrong shape and cut floats to bytes."""
    array = np.asarray(value)
    if array.shape != column.shape or not np.can_cast(array.dtype, column.dtype.numpy, "same_kind"):
        raise WorldError(
            f"the observation of {whose} is {array.dtype}{list(array.shape)}, but its spec says "
            f"{column.dtype}{list(column.shape)}"
        )
    return array
