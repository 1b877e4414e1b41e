"""Assembles batches from the ring's rows, each in one block of memory as it travels.

Which arrays a batch has is said in docs/protocol.md. The blocks are used again once nobody holds them
(`recycler.py`), and a batch is sent from where it was assembled.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from services.replay import kernels
from services.replay.records import Array
from services.replay.recycler import Recycler
from services.replay.ring import Ring
from services.replay.sum_tree import SumTree
from shared.errors import Refused
from shared.layout import ALIGNMENT_BYTES, Block, Layout, Packed, layout_of

PASSED_ON = ("action", "control", "version")  # columns of a step that a batch has as they are
COMPUTED: dict[str, np.dtype[Any]] = {
    "return": np.dtype(np.float32),
    "discount": np.dtype(np.float32),
    "weight": np.dtype(np.float32),
    "index": np.dtype(np.int64),
    "generation": np.dtype(np.uint64),
}


class BatchMaker:
    """The batches of one ring."""

    def __init__(self, ring: Ring, gamma: float, max_batch_bytes: int) -> None:
        self._spec, self._max_batch_bytes = ring.spec, max_batch_bytes
        self._passed_on = [column for column in ring.spec.step_columns if column.name in PASSED_ON]
        # What the kernels read of the ring, in the order in which they take it.
        reward, terminated = ring.columns["reward"], ring.columns["terminated"]
        powers, fields = gamma ** np.arange(ring.n_step + 1), ring.fields(self._passed_on)
        self._stored = ring.packed, reward, terminated, ring.places, powers, fields
        self._shape = ring.segment_steps, ring.slot_rows, ring.spec.stack, ring.spec.observation.row_bytes
        self._shape_array = np.array(self._shape, np.int64)  # quicker to hand over than four numbers
        self._layout_of_size = lru_cache(maxsize=16)(self._layout)
        self._recycler = Recycler()

    def empty(self, size: int, tray: Block | None = None) -> tuple[Packed, int]:
        """The arrays of a batch with any contents, and the address of their block: the tray, if it fits."""
        layout = self._layout_of_size(size)
        if tray is not None and tray.nbytes >= layout.nbytes:
            return Packed(layout, tray), tray.ctypes.data
        block, address, loan = self._recycler.block(layout.nbytes)
        return Packed(layout, block, loan), address

    def draw(self, size: int, key: Array, number: int, tree: SumTree, tray: Block | None) -> Packed:
        """Draw `number`, its weights still P over the smallest P."""
        batch, address = self.empty(size, tray)
        offsets = batch.layout.offsets
        kernels.draw(key, number, size, *tree.parts, *self._stored, address, offsets, self._shape_array)
        return batch

    def gather(self, batch: Packed, address: int) -> None:
        """Fills in everything of the rows at batch["index"] but their weights."""
        computed = (batch[name] for name in ("index", "generation", "return", "discount"))
        kernels.gather(*self._stored, address, batch.layout.offsets, *self._shape, *computed)

    def _layout(self, size: int) -> Layout:
        observation = self._spec.observation
        stacked = observation.dtype.numpy, (size, self._spec.stack, *observation.shape)
        passed_on = [(column.name, column.dtype.numpy, (size, *column.shape)) for column in self._passed_on]
        computed = [(name, dtype, (size,)) for name, dtype in COMPUTED.items()]
        arrays = (("observation", *stacked), ("next_observation", *stacked), *passed_on, *computed)
        needed = sum(ALIGNMENT_BYTES + dtype.itemsize * math.prod(shape) for _name, dtype, shape in arrays)
        if needed > self._max_batch_bytes:
            raise Refused(
                "batch_too_large",
                f"a batch of {size:,} rows needs {needed:,} bytes, {self._max_batch_bytes:,} can be sent; "
                "lower learner.batch_size, or raise limits.max_message_bytes (1 GiB at most)",
            )
        return layout_of(arrays)
