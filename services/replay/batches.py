"""Assembles batches from the ring's rows, each in one block of memory as it travels.

Which arrays a batch has is said in docs/protocol.md. The blocks are used again once nobody holds them
(`recycler.py`), and a batch is sent from where it was assembled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.replay import kernels
from services.replay.recycler import Recycler
from services.replay.ring import Ring
from shared.layout import Layout, Packed, layout_of

PASSED_ON = ("action", "control", "version")  # columns of a step that a batch has as they are
COMPUTED: dict[str, np.dtype[Any]] = {
    "return": np.dtype(np.float32),
    "discount": np.dtype(np.float32),
    "weight": np.dtype(np.float32),
    "index": np.dtype(np.int64),
    "generation": np.dtype(np.uint64),
}

_BYTE = np.dtype(np.uint8)


class BatchMaker:
    """The batches of one ring."""

    def __init__(self, ring: Ring, gamma: float) -> None:
        self._ring, self._spec = ring, ring.spec
        self._powers = gamma ** np.arange(ring.n_step + 1)
        self._passed_on = [column for column in ring.spec.step_columns if column.name in PASSED_ON]
        self._fields = ring.fields(self._passed_on)
        self._frame_bytes = ring.spec.observation.row_bytes
        self._layouts: dict[int, Layout] = {}  # by the batch's size
        self._recycler = Recycler()

    def empty(self, size: int) -> tuple[Packed, int]:
        """The arrays of a batch with any contents, and the address of their block."""
        layout = self._layouts.get(size)
        if layout is None:
            layout = self._layouts[size] = self._layout(size)
        block, address = self._recycler.empty((layout.nbytes,), _BYTE)
        return Packed(layout, block), address

    def gather(self, batch: Packed, address: int) -> None:
        """Fills in everything of the rows at batch["index"] but their weights."""
        ring = self._ring
        kernels.gather(
            ring.packed,
            ring.columns["reward"],
            ring.columns["terminated"],
            ring.places,
            self._powers,
            self._fields,
            address,
            batch.layout.offsets,
            ring.segment_steps,
            ring.slot_rows,
            self._spec.stack,
            self._frame_bytes,
            batch["index"],
            batch["generation"],
            batch["return"],
            batch["discount"],
        )

    def _layout(self, size: int) -> Layout:
        observation = self._spec.observation
        stacked = observation.dtype.numpy, (size, self._spec.stack, *observation.shape)
        passed_on = [(column.name, column.dtype.numpy, (size, *column.shape)) for column in self._passed_on]
        computed = [(name, dtype, (size,)) for name, dtype in COMPUTED.items()]
        return layout_of((("observation", *stacked), ("next_observation", *stacked), *passed_on, *computed))
