"""The subscriber's end of weight broadcasts: one agent's newest state, built from full versions and deltas.

Owns the version held, the last full version, and a delta that waits for its base. Nothing older than the
version held is ever given out. Float16 on the wire is float32 here. The checksum is that of the resulting
state, so a wrong base or a flipped bit ends in `NeedsSnapshot`, never in wrong weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shared.codec import checksum
from shared.errors import BadMessage
from shared.layout import Array, Arrays
from shared.messages import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A newer state. Its arrays may be shared with the last full version: copy them out, do not write."""

    version: int
    updates: int
    tensors: dict[str, Array]


@dataclass(frozen=True, slots=True)
class NeedsSnapshot:
    """Ask for this version in full (None, or if it is refused: the newest) and apply the answer."""

    version: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Old:
    """Nothing newer than what is held; nothing to do."""

    version: int


Outcome = Applied | NeedsSnapshot | Old


@dataclass(frozen=True, slots=True, eq=False)
class _Full:
    version: int
    tensors: dict[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class _Delta:
    message: Weights
    base: int
    tensors: dict[str, Array]


class WeightsState:
    """What one subscriber holds of one agent's weights; `version` 0 means nothing yet."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.version = 0
        self._full: _Full | None = None
        self._waiting: _Delta | None = None

    def apply(self, message: Weights, arrays: Arrays) -> Outcome:
        """Takes in a broadcast or a snapshot; `arrays` may be views on frames, they are copied."""
        if message.agent != self.agent:
            raise BadMessage(f"weights of {message.agent!r} where those of {self.agent!r} are held")
        is_awaited_base = self._waiting is not None and message.version == self._waiting.base
        if message.version <= self.version and not (message.base is None and is_awaited_base):
            return Old(self.version)
        tensors = {name: owned(arrays[name]) for name in arrays}
        if message.base is None:
            return self._apply_full(message, tensors)
        return self._apply_delta(_Delta(message, message.base, tensors))

    def _apply_full(self, message: Weights, tensors: dict[str, Array]) -> Outcome:
        if not _matches(message, tensors):
            return NeedsSnapshot(None, f"version {message.version} does not match its checksum")
        self._full = _Full(message.version, tensors)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.base == message.version and waiting.message.version > self.version:
            outcome = self._apply_delta(waiting)
            if isinstance(outcome, Applied):
                return outcome
        if message.version <= self.version:
            return Old(self.version)
        self.version = message.version
        return Applied(message.version, message.updates, tensors)

    def _apply_delta(self, delta: _Delta) -> Outcome:
        version = delta.message.version
        if self._full is None or self._full.version != delta.base:
            self._waiting = delta
            return NeedsSnapshot(delta.base, f"version {version} builds on {delta.base}, which is not held")
        tensors = self._full.tensors | delta.tensors
        fits = held_layout(tensors) == held_layout(self._full.tensors)
        if not fits or not _matches(delta.message, tensors):
            # Whichever of the two is damaged, nothing may be built on this base again.
            self._full = None
            return NeedsSnapshot(None, f"version {version} on {delta.base} does not match its checksum")
        self.version = version
        return Applied(version, delta.message.updates, tensors)


def widened(array: Array) -> Array:
    """The array as a subscriber holds it: float16 becomes float32, everything else stays what it is."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def owned(array: Array) -> Array:
    """The one copy of an array that arrived in a frame, as it is held."""
    return array.astype(np.float32) if array.dtype == np.float16 else np.array(array, order="C", copy=True)


def held_layout(tensors: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's type and shape as a subscriber holds it."""
    return {name: (_held_dtype(array), array.shape) for name, array in tensors.items()}


def same_bytes(left: Array, right: Array) -> bool:
    """Bit for bit: 0.0 and -0.0 differ, as they do for a checksum, and NaN equals itself."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _held_dtype(array: Array) -> str:
    return "float32" if array.dtype == np.float16 else str(array.dtype.name)


def _matches(message: Weights, tensors: Mapping[str, Array]) -> bool:
    return checksum(tensors[name] for name in sorted(tensors)) == message.checksum
