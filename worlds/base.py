"""What every world is: some copies of one game, played side by side as numpy arrays.

A world owns the state of its E copies, called *slots*, and the rules; it knows nothing of networks, sockets
or episodes' lengths. A turn is `begin_turn`, `observe`, the choice of all actions together, and `act`,
which applies the agents one after another. The caller resets every slot before the first turn, ends an
epoch after `max_turns` turns (truncation is its business), and resets the slots whose epochs ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError
from shared.specs import AgentSpec

Array = NDArray[Any]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
ActionArray = NDArray[np.int64]
IndexArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class AgentActions:
    """What one agent does in each slot; a part that its spec does not have is None."""

    discrete: ActionArray | None = None  # [E]
    continuous: FloatArray | None = None  # [E, size]


Script = Callable[[Array], AgentActions]
"""What an agent does that learns nothing: from its newest observation in each slot [E, *shape] to actions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one agent got for its actions; `terminated` is a real end inside the epoch, not truncation."""

    reward: FloatArray  # [E]
    terminated: BoolArray  # [E]


class World(ABC):
    """E copies ("slots") of one world, played side by side; every array has the leading dimension E.

    The same seed, resets and actions give the same run. An agent that terminated before the others stays
    in `observe` and `act` until its slot is reset; what it does there means nothing.
    """

    specs: Mapping[str, AgentSpec]
    """By agent id: "agent_0", "agent_1", ... in acting order (see `agent_ids`)."""
    envs: int
    max_turns: int

    @abstractmethod
    def reset(self, slots: BoolArray) -> None:
        """Starts a new epoch in the slots marked in this mask [E]; the others are left as they are."""

    @abstractmethod
    def begin_turn(self, slots: BoolArray) -> None:
        """Moves everything that is not an agent, in the slots marked in this mask [E]."""

    @abstractmethod
    def observe(self) -> dict[str, Array]:
        """The newest observation of each agent, [E, *shape], at any time after a reset.

        It changes nothing. The arrays are valid only until the next call of any method: copy what is kept.
        """

    @abstractmethod
    def act(self, actions: Mapping[str, AgentActions]) -> dict[str, Outcome]:
        """Applies the agents' actions in acting order. The arrays are valid only until the next call."""

    def on_epoch_start(self, slots: BoolArray, epochs: ActionArray) -> None:  # noqa: B027 - may stay empty
        """Called after these slots were reset; `epochs` [E] has each slot's epoch number."""

    def on_epoch_end(self, slots: BoolArray, epochs: ActionArray) -> None:  # noqa: B027 - may stay empty
        """Called when these slots' epochs, numbered in `epochs` [E], ended, before they are reset."""

    def script_for(self, agent: str, seed: int) -> Script:
        """What a `scripted` agent does for which the config names no script; a world may offer one."""
        raise ConfigError(
            f"agents.{agent}: {type(self).__name__} offers no script of its own; "
            'set script to yours, as "package.module:factory"'
        )


def agent_ids(count: int) -> tuple[str, ...]:
    """The ids of a world's agents, in acting order."""
    return tuple(f"agent_{index}" for index in range(count))
