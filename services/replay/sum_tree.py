"""Owns the priorities as a sum tree: 16 children to a node, whole batches at a time.

Leaves are float32, so that sixteen of them are one cache line; everything above is float64. A node is always
the sum of its children, recomputed and never adjusted, so nothing drifts; beside the sums lie the running
sums within each family, so that a child is found with one comparison of sixteen numbers. A leaf of value 0 is
never drawn, whatever rounding does at the edges. The loops are in `kernels.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.replay.intrinsics import FAN_OUT
from services.replay.kernels import LINE_BYTES, tree_assign, tree_draw, tree_sum_up

Floats = npt.NDArray[np.float64]
Leaves = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class SumTree:
    """Values at `capacity` leaves, drawn in proportion to them."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a sum tree of {capacity} leaves; it needs at least 1")
        self.capacity = capacity
        sizes = [_padded(_padded(capacity) // FAN_OUT)]  # of the levels above the leaves, lowest first
        while sizes[-1] > FAN_OUT:
            sizes.append(_padded(sizes[-1] // FAN_OUT))
        self._offsets = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        self._all_leaves = _aligned_zeros(_padded(capacity), np.dtype(np.float32))
        self._leaves = self._all_leaves[:capacity]
        self._sums = _aligned_zeros(sum(sizes), np.dtype(np.float64))
        self._running = _aligned_zeros(sum(sizes), np.dtype(np.float64))
        arrays = (self._all_leaves, self._sums, self._running)
        # The tree as `slot_kernels.store_segment` knows it, which sets the leaves of a slot.
        self.table = np.array([*(array.ctypes.data for array in arrays), *self._offsets], np.int64)

    @property
    def total(self) -> float:
        return float(self._running[-1])

    @property
    def parts(self) -> tuple[Leaves, Floats, Ints]:
        """Leaves, running sums and where each level of those begins: for kernels that draw."""
        return self._all_leaves, self._running, self._offsets

    @property
    def nbytes(self) -> int:
        return self._all_leaves.nbytes + self._sums.nbytes + self._running.nbytes

    def get(self, indices: Ints) -> Leaves:
        return self._leaves[indices]

    def set(self, indices: Ints, values: Leaves) -> None:
        """Of an index that occurs twice the last value stays."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.capacity:
            raise IndexError(f"leaves {indices.min()} to {indices.max()} in a tree of {self.capacity}")
        self.set_checked(indices, values)

    def set_checked(self, indices: Ints, values: Leaves) -> None:
        """The same for indices that are known to be inside the tree."""
        tree_assign(self._all_leaves, self._sums, self._running, self._offsets, indices, values)

    def set_range(self, start: int, values: Leaves) -> None:
        """Leaves start, start + 1, ... at once."""
        self._leaves[start : start + len(values)] = values
        self._sum_up(start, start + len(values))

    def _sum_up(self, start: int, stop: int) -> None:
        tree_sum_up(self._all_leaves, self._sums, self._running, self._offsets, start, stop)

    def rebuild(self, leaves: Leaves) -> None:
        """All leaves at once."""
        if leaves.shape != (self.capacity,):
            raise ValueError(f"{leaves.shape} leaves for a tree of {self.capacity}")
        self.set_range(0, leaves)

    def draw(self, targets: Floats, found: Ints, values: Leaves) -> float:
        """For each target in [0, total) the leaf whose share of the running sum holds it, into `found`, and
        these leaves' values; returns the smallest of those. Uses up `targets`."""
        if not self.total > 0.0:
            raise ValueError("nothing to draw: every leaf is 0")
        smallest: float = tree_draw(self._all_leaves, self._running, self._offsets, targets, found, values)
        return smallest


def _padded(length: int) -> int:
    return -(-length // FAN_OUT) * FAN_OUT


def _aligned_zeros(length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros that begin at a cache line, so that no family of children touches one line more than it needs."""
    size = length * dtype.itemsize
    raw = np.zeros(size + LINE_BYTES, np.uint8)
    skip = -raw.ctypes.data % LINE_BYTES
    return raw[skip : skip + size].view(dtype)
