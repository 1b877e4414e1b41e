"""Treasure hunt: agents on a walled grid walk over gems, which appear at random.

Owns the rules and the state of E grids at once. A grid is stored as one byte per cell (EMPTY, WALL, one code
per kind of item, then the agents), padded with wall so that every agent's window is a plain gather; agents
are positions in the flattened grids. Nothing loops over slots; agents are looped over because an earlier one
may take the gem or the cell that a later one wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import ConfigError, WorldError
from shared.specs import AgentSpec, Discrete, DType, vector_observation
from worlds.base import (
    ActionArray,
    AgentActions,
    Array,
    BoolArray,
    IndexArray,
    Outcome,
    Script,
    World,
    agent_ids,
)

EMPTY = 0
WALL = 1
FIRST_ITEM = 2
GEM_REWARD = 10.0

UP, DOWN, LEFT, RIGHT = range(4)
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # (rows, columns), in the order of the actions

Cell = tuple[int, int]
Codes = NDArray[np.uint8]


class TreasureHuntRules(BaseModel):
    """What may be set, and between which bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    envs: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)]
    agents: Annotated[int, Field(ge=1)]
    max_turns: Annotated[int, Field(ge=1)]
    size: Annotated[int, Field(ge=3, le=1000)]
    """Cells along one side, the wall ring included."""
    gem_probability: Annotated[float, Field(ge=0.0, le=1.0)]
    """How likely an empty cell becomes an item, each turn; the kinds have equal odds."""
    view: Annotated[int, Field(ge=1, le=50)]
    """How many cells an agent sees in each direction."""
    stack: Annotated[int, Field(ge=1, le=64)]
    items: Annotated[
        dict[str, Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1, max_length=200)
    ]
    """The reward for each kind of item."""
    wall_reward: Annotated[float, Field(allow_inf_nan=False)]

    @model_validator(mode="after")
    def _agents_have_room(self) -> TreasureHuntRules:
        cells = (self.size - 2) ** 2
        if self.agents > cells:
            raise ValueError(
                f"{self.agents} agents do not fit into the {cells} inner cells of size={self.size}: "
                "raise size or lower agents"
            )
        return self

    @property
    def agent_code(self) -> int:
        return FIRST_ITEM + len(self.items)

    @property
    def self_code(self) -> int:
        return self.agent_code + 1

    @property
    def channels(self) -> int:
        return self.self_code + 1


class TreasureHunt(World):
    """E treasure hunts. What `observe` and `act` return are fresh arrays; they stay valid.

    `gem_reward` is for the usual hunt with one kind of item, `items` (kind -> reward) for one with several.

    An observation is the agent's square window, row by row, each cell one-hot over empty, wall, the items in
    their order, another agent, itself; outside the map is wall.
    """

    def __init__(
        self,
        envs: int,
        seed: int,
        *,
        agents: int = 3,
        max_turns: int = 50,
        size: int = 10,
        gem_probability: float = 0.02,
        view: int = 2,
        stack: int = 5,
        gem_reward: float | None = None,
        wall_reward: float = -1.0,
        items: Mapping[str, float] | None = None,
    ) -> None:
        self.rules = rules = _validated_rules(
            envs=envs,
            seed=seed,
            agents=agents,
            max_turns=max_turns,
            size=size,
            gem_probability=gem_probability,
            view=view,
            stack=stack,
            items=_items(gem_reward, items),
            wall_reward=wall_reward,
        )
        self.envs = rules.envs
        self.max_turns = rules.max_turns
        self._ids = agent_ids(rules.agents)
        self.specs = dict.fromkeys(self._ids, _agent_spec(rules))
        self._rng = np.random.Generator(np.random.PCG64(rules.seed))
        self._build_grids()
        self._build_tables()
        self.reset(np.ones(self.envs, dtype=np.bool_))

    def _build_grids(self) -> None:
        # The ring itself is wall, so an agent never sees farther than view - 1 cells beyond it.
        pad = self.rules.view - 1
        self._side = side = self.rules.size + 2 * pad
        edge = pad + 1
        grids = np.full((self.envs, side, side), WALL, dtype=np.uint8)
        self._flat = grids.reshape(-1)
        self._map = grids[:, pad : side - pad, pad : side - pad]
        self._inner = grids[:, edge : side - edge, edge : side - edge]
        every_cell = np.arange(grids.size, dtype=np.intp).reshape(grids.shape)
        self._map_cells = every_cell[:, pad : side - pad, pad : side - pad]
        inner_cells = every_cell[:, edge : side - edge, edge : side - edge]
        self._inner_cells = inner_cells.reshape(self.envs, -1)  # [E, inner cells] -> place in _flat
        self._spawn_cells = self._inner_cells.reshape(-1)
        self._positions: IndexArray = np.zeros((self.rules.agents, self.envs), dtype=np.intp)

    def _build_tables(self) -> None:
        rules, side = self.rules, self._side
        reach = np.arange(-rules.view, rules.view + 1, dtype=np.intp)
        self._window = (reach[:, None] * side + reach).reshape(-1)
        self._window_center = self._window.size // 2
        self._one_hot = np.eye(rules.channels, dtype=np.uint8)
        self._moves = np.array([rows * side + columns for rows, columns in STEPS], dtype=np.intp)
        # By the code of the cell that an agent steps on.
        self._rewards = np.array([0.0, rules.wall_reward, *rules.items.values(), 0.0], dtype=np.float32)
        self._enterable = np.ones(rules.agent_code + 1, dtype=np.bool_)
        self._enterable[[WALL, rules.agent_code]] = False
        self._spawn_below = np.float32(rules.gem_probability)

    def reset(self, slots: BoolArray) -> None:
        count = int(np.count_nonzero(slots))
        if count == 0:
            return
        self._inner[slots] = EMPTY
        cells = self._inner_cells[slots]
        shuffled = self._rng.random(cells.shape).argsort(axis=1)
        starts = np.take_along_axis(cells, shuffled[:, : self.rules.agents], axis=1).T
        self._positions[:, slots] = starts
        self._flat[starts] = self.rules.agent_code

    def begin_turn(self, slots: BoolArray) -> None:
        draws = self._rng.random(self._spawn_cells.size, dtype=np.float32)
        hits = (draws < self._spawn_below).nonzero()[0]
        if not slots.all():
            hits = hits[slots[hits // (self._spawn_cells.size // self.envs)]]
        cells = self._spawn_cells[hits]
        free = self._flat[cells] == EMPTY
        self._flat[cells[free]] = self._kinds(draws[hits[free]])

    def _kinds(self, draws: NDArray[np.float32]) -> Codes | int:
        """Which items appear. A draw below the probability p is uniform in [0, p), so it tells that too."""
        kinds = len(self.rules.items)
        if kinds == 1:
            return FIRST_ITEM
        # Rounding may lift a draw just below p to a kind that does not exist.
        codes: NDArray[np.float32] = np.minimum(draws / self._spawn_below * kinds, kinds - 1) + FIRST_ITEM
        return codes.astype(np.uint8)

    def observe(self) -> dict[str, Array]:
        windows = self._flat.take(self._positions[:, :, None] + self._window)  # [agents, E, window]
        windows[:, :, self._window_center] = self.rules.self_code
        seen = self._one_hot.take(windows, axis=0).reshape(len(self._ids), self.envs, -1)
        return dict(zip(self._ids, seen, strict=True))

    def act(self, actions: Mapping[str, AgentActions]) -> dict[str, Outcome]:
        targets = self._positions + self._moves.take(self._chosen(actions))
        rewards = np.empty(targets.shape, dtype=np.float32)
        for agent in range(len(self._ids)):
            rewards[agent] = self._step(agent, targets[agent])
        never = np.zeros(targets.shape, dtype=np.bool_)
        outcomes = map(Outcome, rewards, never)
        return dict(zip(self._ids, outcomes, strict=True))

    def _step(self, agent: int, target: IndexArray) -> NDArray[np.float32]:
        flat, position = self._flat, self._positions[agent]
        found = flat[target]
        flat[position] = EMPTY
        np.copyto(position, target, where=self._enterable[found])
        flat[position] = self.rules.agent_code
        return self._rewards[found]

    def _chosen(self, actions: Mapping[str, AgentActions]) -> ActionArray:
        parts = [self._discrete(agent, actions) for agent in self._ids]
        chosen = np.concatenate(parts).reshape(len(parts), self.envs)
        # Negative numbers are huge as unsigned ones, so that one comparison finds every wrong action.
        wrong = chosen.view(np.uint64) >= len(STEPS)
        if wrong.any():
            raise WorldError(f"action {chosen[wrong][0]} does not exist: 0 to 3 are up, down, left, right")
        return chosen

    def _discrete(self, agent: str, actions: Mapping[str, AgentActions]) -> ActionArray:
        given = actions.get(agent)
        if given is None or given.discrete is None:
            raise WorldError(
                f"{agent} has no discrete action: give all of {', '.join(self._ids)} one per slot"
            )
        if given.discrete.shape != (self.envs,) or given.discrete.dtype != np.int64:
            raise WorldError(
                f"the actions of {agent} are {given.discrete.dtype}{list(given.discrete.shape)}, "
                f"not int64[{self.envs}]"
            )
        return given.discrete

    def script_for(self, agent: str, seed: int) -> Script:
        """Walks to the nearest item it sees."""
        from worlds.treasure_hunt_policies import NearestItemPolicy  # noqa: PLC0415 - it imports this module

        policy = NearestItemPolicy(self.rules, seed)
        return lambda observations: AgentActions(discrete=policy(observations))

    @property
    def cells(self) -> Codes:
        """The maps as codes, [E, size, size]: EMPTY, WALL, the items in their order, then an agent."""
        return self._map.copy()

    @property
    def agent_cells(self) -> IndexArray:
        """Row and column of each agent in the maps, [agents, E, 2]."""
        pad = self.rules.view - 1
        rows, columns = np.divmod(self._positions % self._side**2, self._side)
        return np.stack([rows - pad, columns - pad], axis=-1)

    def arrange(self, slot: int, agents: Sequence[Cell], items: Mapping[Cell, str] | None = None) -> None:
        """Sets one slot's scene by hand: agents in acting order, and items by cell."""
        kinds = list(self.rules.items)
        self._check_scene(agents, items or {})
        self._inner[slot] = EMPTY
        for cell, kind in (items or {}).items():
            self._map[slot][cell] = FIRST_ITEM + kinds.index(kind)
        for agent, cell in enumerate(agents):
            self._map[slot][cell] = self.rules.agent_code
            self._positions[agent, slot] = self._map_cells[slot][cell]

    def _check_scene(self, agents: Sequence[Cell], items: Mapping[Cell, str]) -> None:
        taken = [*agents, *items]
        if len(agents) != self.rules.agents or len(set(taken)) != len(taken):
            raise WorldError(f"a scene needs {self.rules.agents} agents and at most one thing per cell")
        for row, column in taken:
            if not (0 < row < self.rules.size - 1 and 0 < column < self.rules.size - 1):
                raise WorldError(
                    f"cell {(row, column)} is not inside the wall ring of size {self.rules.size}"
                )
        for kind in items.values():
            if kind not in self.rules.items:
                raise WorldError(f"unknown item {kind!r}: this hunt has {', '.join(self.rules.items)}")


def _items(gem_reward: float | None, items: Mapping[str, float] | None) -> Mapping[str, float]:
    if items is None:
        return {"gem": GEM_REWARD if gem_reward is None else gem_reward}
    if gem_reward is not None:
        raise ConfigError(
            f"treasure_hunt: gem_reward = {gem_reward} beside items = {items}: "
            "leave gem_reward out and give the gem's reward in items"
        )
    return items


def _validated_rules(**values: object) -> TreasureHuntRules:
    try:
        return TreasureHuntRules.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(
            "\n".join(_explain(problem) for problem in error.errors(include_url=False))
        ) from None


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if not key:
        return f"treasure_hunt: {problem['ctx']['error']}"
    return f"treasure_hunt: {key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _agent_spec(rules: TreasureHuntRules) -> AgentSpec:
    cells = (2 * rules.view + 1) ** 2
    return AgentSpec(
        observation=vector_observation(cells * rules.channels, DType.UINT8),
        stack=rules.stack,
        discrete=Discrete(n=len(STEPS)),
    )
