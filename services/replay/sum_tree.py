"""Owns the priorities as a sum tree: 16 children to a node, float64, whole batches at a time.

A node is always the sum of its children, recomputed and never adjusted, so nothing drifts. A node's children
fill two cache lines. A leaf of value 0 is never drawn, whatever rounding does at the edges. The loops are in
`kernels.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.replay.kernels import FAN_OUT, tree_assign, tree_draw, tree_sum_up

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CACHE_LINE_BYTES = 64


class SumTree:
    """Values at `capacity` leaves, drawn in proportion to them."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a sum tree of {capacity} leaves; it needs at least 1")
        self.capacity = capacity
        sizes = [_padded(capacity)]  # of the levels, leaves first
        while sizes[-1] > FAN_OUT:
            sizes.append(_padded(sizes[-1] // FAN_OUT))
        self._offsets = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        self._nodes = _aligned_zeros(sum(sizes))
        self._leaves = self._nodes[:capacity]
        self._top = self._nodes[self._offsets[-1] :]

    @property
    def total(self) -> float:
        return float(self._top.sum())

    def get(self, indices: Ints) -> Floats:
        return self._leaves[indices]

    def set(self, indices: Ints, values: Floats) -> None:
        """Of an index that occurs twice the last value stays."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.capacity:
            raise IndexError(f"leaves {indices.min()} to {indices.max()} in a tree of {self.capacity}")
        tree_assign(self._nodes, self._offsets, indices, values)

    def set_range(self, start: int, values: Floats) -> None:
        """Leaves start, start + 1, ... at once."""
        self._leaves[start : start + len(values)] = values
        tree_sum_up(self._nodes, self._offsets, start, start + len(values))

    def rebuild(self, leaves: Floats) -> None:
        """All leaves at once."""
        if leaves.shape != (self.capacity,):
            raise ValueError(f"{leaves.shape} leaves for a tree of {self.capacity}")
        self.set_range(0, leaves)

    def draw(self, targets: Floats) -> Ints:
        """For each target in [0, total) the leaf whose share of the running sum holds it."""
        if not self.total > 0.0:
            raise ValueError("nothing to draw: every leaf is 0")
        found = np.empty(len(targets), np.int64)
        tree_draw(self._nodes, self._offsets, targets, found)
        return found


def _padded(length: int) -> int:
    return -(-length // FAN_OUT) * FAN_OUT


def _aligned_zeros(length: int) -> Floats:
    """Zeros that begin at a cache line, so that no family of children touches a third one."""
    raw = np.zeros(length + CACHE_LINE_BYTES // 8)
    skip = (-raw.ctypes.data % CACHE_LINE_BYTES) // 8
    return raw[skip : skip + length]
