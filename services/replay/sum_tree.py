"""Owns the priorities as a sum tree: 16 children to a node, float64, whole batches level by level.

A node is always the sum of its children, recomputed and never adjusted, so nothing drifts. The highest level
is kept flat and searched as one sorted row of running sums: two narrow levels lie below it at 2^17 leaves.
A leaf of value 0 is never drawn, whatever rounding does at the edges.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FAN_OUT = 16
ROOT_CHILDREN = 1024  # below this a running sum over all of them is cheaper than one more level


class SumTree:
    """Values at `capacity` leaves, drawn in proportion to them."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a sum tree of {capacity} leaves; it needs at least 1")
        self.capacity = capacity
        self._levels = [np.zeros(_padded(capacity))]  # leaves first
        while len(self._levels[-1]) > ROOT_CHILDREN:
            self._levels.append(np.zeros(_padded(len(self._levels[-1]) // FAN_OUT)))
        self._families = [level.reshape(-1, FAN_OUT) for level in self._levels[:-1]]
        self._root_ends: Floats | None = None

    @property
    def total(self) -> float:
        return float(self._ends()[-1])

    def get(self, indices: Ints) -> Floats:
        return self._levels[0][indices]

    def set(self, indices: Ints, values: Floats) -> None:
        """Of an index that occurs twice the last value stays."""
        self._levels[0][indices] = values
        nodes = indices
        for families, parents in zip(self._families, self._levels[1:], strict=True):
            nodes = nodes // FAN_OUT
            parents[nodes] = families.take(nodes, axis=0).sum(axis=1)
        self._root_ends = None

    def set_range(self, start: int, values: Floats) -> None:
        """Leaves start, start + 1, ... at once."""
        self._levels[0][start : start + len(values)] = values
        self._sum_up(start, start + len(values))

    def rebuild(self, leaves: Floats) -> None:
        """All leaves at once."""
        if leaves.shape != (self.capacity,):
            raise ValueError(f"{leaves.shape} leaves for a tree of {self.capacity}")
        self.set_range(0, leaves)

    def draw(self, targets: Floats) -> Ints:
        """For each target in [0, total) the leaf whose share of the running sum holds it."""
        ends = self._ends()
        if not ends[-1] > 0.0:
            raise ValueError("nothing to draw: every leaf is 0")
        rest = np.clip(targets, 0.0, np.nextafter(ends[-1], 0.0))
        nodes = ends.searchsorted(rest, side="right")
        rest = rest - _start_of(nodes, ends)
        for families in reversed(self._families):
            nodes, rest = _descend(families, nodes, rest)
        return nodes

    def _sum_up(self, start: int, stop: int) -> None:
        for families, parents in zip(self._families, self._levels[1:], strict=True):
            start, stop = start // FAN_OUT, (stop - 1) // FAN_OUT + 1
            families[start:stop].sum(axis=1, out=parents[start:stop])
        self._root_ends = None

    def _ends(self) -> Floats:
        if self._root_ends is None:
            self._root_ends = self._levels[-1].cumsum()
        return self._root_ends


def _padded(length: int) -> int:
    return -(-length // FAN_OUT) * FAN_OUT


def _start_of(nodes: Ints, ends: Floats) -> Floats:
    starts = ends[nodes - 1]
    starts[nodes == 0] = 0.0
    return starts


def _descend(families: Floats, nodes: Ints, rest: Floats) -> tuple[Ints, Floats]:
    """The child of each node in which the rest falls, and what is left of it there.

    A node's value and the end of its children's running sum can differ in the last bit, so the rest is held
    below that end: then the first child whose end exceeds it exists, and its own value is above 0.
    """
    ends = families.take(nodes, axis=0).cumsum(axis=1)
    rest = np.minimum(rest, np.nextafter(ends[:, -1], 0.0))
    child = (ends <= rest[:, None]).sum(axis=1)
    starts = ends[np.arange(len(child)), child - 1]
    starts[child == 0] = 0.0
    return nodes * FAN_OUT + child, rest - starts
