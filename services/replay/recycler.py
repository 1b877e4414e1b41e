"""Owns the memory of batches: blocks of bytes that are used again once nobody holds them any more.

Fresh memory makes gathering a batch slower: the system has to find and clear its pages. A block is free when
its reference count says that only this pool knows it, and libzmq has let go of it. Views on it, dictionaries
and torch tensors all hold such references, so a batch stays the caller's own for as long as it is kept.
"""

from __future__ import annotations

import sys

import numpy as np

from services.replay.release import RELEASE
from shared.layout import Block
from shared.lending import Loan, lend

Entry = tuple[Block, int, Loan | None]

KEPT_BLOCKS = 32  # of one size; more than that are somebody's collection, not batches on their way
KEPT_SIZES = 4  # a learner asks for one size; who asks for many must not fill the memory


class Recycler:
    """Each block owns its memory: so views on it hold it, not something below."""

    def __init__(self) -> None:
        self._pools: dict[int, list[Entry]] = {}  # by size, the newest last

    def block(self, size: int) -> Entry:
        """A block with any contents, its address, and what it can be sent with."""
        pool = self._pools.get(size)
        if pool is None:
            pool = self._pools[size] = []
            if len(self._pools) > KEPT_SIZES:
                del self._pools[next(iter(self._pools))]
        for entry in pool:
            loan = entry[2]  # which holds the block too
            if sys.getrefcount(entry[0]) == _UNHELD + (loan is not None) and not (loan and loan.out):
                return entry[0], entry[1], loan  # never the pool's own entry: that does not hold the block
        block = np.zeros(size, np.uint8)  # its gaps travel too: nothing of old memory may be in them
        address = block.ctypes.data
        if len(pool) >= KEPT_BLOCKS:
            return block, address, None
        loan = lend(block, RELEASE)
        pool.append((block, address, loan))
        return block, address, loan


def _references_when_unheld() -> int:
    """What `getrefcount` says, asked as above, of a block that only a pool holds."""
    entry = (np.empty(1), 0)
    return sys.getrefcount(entry[0])


_UNHELD = _references_when_unheld()
