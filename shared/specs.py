"""What an agent sees and does, as named columns of fixed type and shape.

An `AgentSpec` is the contract between a world, the wire, the replay ring and the networks: the first actor
registers it with the parameter server and every array that travels later is checked against it. Columns are
per *observation* (one row for each thing seen, the last one of an episode included) or per *step* (one row
for each action taken). `stack` says how many of the newest observations the network is given; they are
stored once and stacked when a batch is drawn.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator


class DType(StrEnum):
    """The array element types that may travel and be stored."""

    BOOL = "bool"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    UINT64 = "uint64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return _NUMPY[self]


# Tables, because asking numpy for a type by name, or for the name of a type, takes microseconds.
_NUMPY: dict[DType, np.dtype[np.generic]] = {dtype: np.dtype(dtype.value) for dtype in DType}
_DTYPES = {numpy: dtype for dtype, numpy in _NUMPY.items()}


def dtype_of(numpy: np.dtype[np.generic]) -> DType:
    """Our name for a numpy type; ValueError if such arrays do not travel."""
    if numpy not in _DTYPES:
        raise ValueError(f"arrays of {numpy} do not travel; possible are {', '.join(DType)}")
    return _DTYPES[numpy]


Per = Literal["observation", "step"]
AGENT_ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"  # it names directories, so never "." or ".."


class Column(BaseModel):
    """One named array of a segment: its element type, the shape of one row, and what it has rows for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    dtype: DType
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), max_length=6)
    per: Per = "step"

    @property
    def row_items(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.row_items * self.dtype.numpy.itemsize


# Every agent's steps have these beside its actions. `version` is that of the weights that chose the action.
STEP_COLUMNS = (
    Column(name="reward", dtype=DType.FLOAT32),
    Column(name="terminated", dtype=DType.BOOL),
    Column(name="truncated", dtype=DType.BOOL),
    Column(name="turn", dtype=DType.INT32),
    Column(name="version", dtype=DType.INT64),
)


class Discrete(BaseModel):
    """A choice among `n` actions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["discrete"] = "discrete"
    n: int = Field(ge=2, le=100_000)


class Continuous(BaseModel):
    """A vector of real numbers between `low` and `high`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["continuous"] = "continuous"
    size: int = Field(ge=1, le=4096)
    low: float = Field(default=-1.0, allow_inf_nan=False)
    high: float = Field(default=1.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _low_below_high(self) -> Continuous:
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class AgentSpec(BaseModel):
    """What one agent sees (one observation column) and does (discrete and/or continuous parts)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    observation: Column
    stack: int = Field(default=1, ge=1, le=64)
    discrete: Discrete | None = None
    continuous: Continuous | None = None

    @model_validator(mode="after")
    def _has_an_action(self) -> AgentSpec:
        if self.discrete is None and self.continuous is None:
            raise ValueError("an agent needs a discrete action, a continuous action, or both")
        if self.observation.per != "observation" or self.observation.name != "observation":
            raise ValueError("the observation column must be named 'observation' and be per observation")
        return self

    @property
    def observation_columns(self) -> tuple[Column, ...]:
        return (self.observation,)

    @property
    def step_columns(self) -> tuple[Column, ...]:
        actions = []
        if self.discrete is not None:
            actions.append(Column(name="action", dtype=DType.INT64))
        if self.continuous is not None:
            actions.append(Column(name="control", dtype=DType.FLOAT32, shape=(self.continuous.size,)))
        return (*actions, *STEP_COLUMNS)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Every column of a segment, in the order in which they travel, are stored and are checksummed."""
        return (*self.observation_columns, *self.step_columns)


def vector_observation(size: int, dtype: DType = DType.FLOAT32) -> Column:
    """The usual observation column: a flat vector."""
    return Column(name="observation", dtype=dtype, shape=(size,), per="observation")
