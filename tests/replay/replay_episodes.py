"""Episodes, how an actor cuts them into segments, and what a batch row of them must look like.

Every step's `version` is a number of its own, so that a drawn row says which step it claims to be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.replay.buffer import AgentBuffer
from services.replay.ring import Ring
from services.replay.slot_kernels import STAGES
from shared.codec import pack_segment, segment_checksum
from shared.messages import Segment
from shared.specs import AgentSpec, Column, Continuous, Discrete, DType

AGENT = "agent_0"
GAMMA = 0.9


def make_spec(stack: int = 2, shape: tuple[int, ...] = (2,), dtype: DType = DType.INT32) -> AgentSpec:
    return AgentSpec(
        observation=Column(name="observation", dtype=dtype, shape=shape, per="observation"),
        stack=stack,
        discrete=Discrete(n=4),
        continuous=Continuous(size=2),
    )


def make_buffer(directory: Path, spec: AgentSpec, **changes: Any) -> AgentBuffer:
    settings: dict[str, Any] = {
        "capacity_steps": 64,
        "segment_steps": 4,
        "n_step": 3,
        "gamma": GAMMA,
        "alpha": 0.6,
        "priority_epsilon": 1e-3,
        "min_steps": 4,
        "samples_per_insert": 8.0,
        "tolerance_samples": 100.0,
        "seed": 7,
        "now": 0.0,
    }
    return AgentBuffer(directory, AGENT, spec, **(settings | changes))


def any_bits(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Values of this type with all the bits that it can have: for floats also those that are no numbers."""
    if dtype == DType.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(dtype.numpy.itemsize * int(np.prod(shape))), dtype.numpy).reshape(shape)


@dataclass
class Episode:
    """`length` steps and length + 1 observations; step t has the version `first` + t."""

    spec: AgentSpec
    first: int
    length: int
    end: str = ""  # "terminated", "truncated", or "" for one that is cut off by the end of an epoch
    arrays: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.first)
        steps, observation = self.length, self.spec.observation
        self.arrays = {
            "observation": any_bits(rng, observation.dtype, (steps + 1, *observation.shape)),
            "action": rng.integers(0, 4, steps),
            "control": rng.random((steps, 2), dtype=np.float32),
            "reward": rng.normal(size=steps).astype(np.float32),
            "terminated": np.zeros(steps, bool),
            "truncated": np.zeros(steps, bool),
            "turn": np.arange(steps, dtype=np.int32),
            "version": np.arange(self.first, self.first + steps),
        }
        if self.end:
            self.arrays[self.end][-1] = True

    def cut(self, segment_steps: int, n_step: int) -> list[tuple[dict[str, int], dict[str, np.ndarray]]]:
        """The lengths and arrays of its segments, with the context rows that an actor sends."""
        pieces = []
        for start in range(0, self.length, segment_steps):
            stop = min(self.length, start + segment_steps)
            before = min(self.spec.stack - 1, start)
            end = min(self.length + 1, stop + n_step)
            lengths = {"before": before, "owned": stop - start, "rows": end - start + before}
            pieces.append((lengths, self._rows(start - before, end)))
        return pieces

    def _rows(self, start: int, end: int) -> dict[str, np.ndarray]:
        return {
            column.name: self.arrays[column.name][start : end - (column.per == "step")].copy()
            for column in self.spec.columns
        }

    def expected(self, step: int, n_step: int) -> dict[str, Any]:
        """The row of a batch for this step, put together one number at a time."""
        last = min(self.length, step + n_step)
        value = sum(GAMMA ** (t - step) * float(self.arrays["reward"][t]) for t in range(step, last))
        ended = bool(self.arrays["terminated"][last - 1])
        return {
            "observation": self._stack(step),
            "next_observation": self._stack(last),
            "action": self.arrays["action"][step],
            "control": self.arrays["control"][step],
            "return": value,
            "discount": 0.0 if ended else GAMMA ** (last - step),
        }

    def _stack(self, newest: int) -> np.ndarray:
        observations = self.arrays["observation"]
        frames = [
            observations[t] if t >= 0 else np.zeros_like(observations[0])
            for t in range(newest - self.spec.stack + 1, newest + 1)
        ]
        return np.stack(frames)


def assert_row(batch: dict[str, np.ndarray], i: int, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name in ("return", "discount"):
            np.testing.assert_allclose(batch[name][i], value, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(batch[name][i], value, err_msg=name)


@dataclass
class Sender:
    """One stream as its actor counts it."""

    spec: AgentSpec
    number: int = 1
    sequence: int = 0
    produced: int = 0

    @property
    def incarnation(self) -> str:
        return f"{self.number:032x}"

    def next(self, lengths: dict[str, int], arrays: dict[str, np.ndarray]) -> Segment:
        self.sequence += 1
        self.produced += lengths["owned"]
        return self.segment(self.sequence, lengths, arrays)

    def segment(
        self, sequence: int, lengths: dict[str, int], arrays: dict[str, np.ndarray], **changes: Any
    ) -> Segment:
        fields: dict[str, Any] = {
            "incarnation": self.incarnation,
            "agent": AGENT,
            "sequence": sequence,
            "produced_steps": self.produced,
            "actor_index": 0,
            "slot": 0,
            "epoch": 0,
            "checksum": segment_checksum(pack_segment(self.spec, arrays)),
        }
        return Segment(**(fields | lengths | changes))


class DeathError(Exception):
    """Stands for the end of the process."""


def die_before(ring: Ring, stage: str) -> None:
    """The next insert carries out the stages before this one and ends."""
    store = ring._store

    def store_some(*arguments: Any) -> None:
        store(*arguments[:-1], STAGES.index(stage))
        raise DeathError

    ring._store = store_some


def fill(buffer: AgentBuffer, sender: Sender, episodes: list[Episode]) -> None:
    for episode in episodes:
        for lengths, arrays in episode.cut(buffer.segment_steps, buffer.n_step):
            assert buffer.insert(sender.next(lengths, arrays), arrays, now=0.0) == "stored"
