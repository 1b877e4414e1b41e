"""Owns the memory of batches: large arrays that are used again once nobody holds them any more.

Fresh memory makes gathering a batch slower: the system has to find and clear its pages. An array is free when
its reference count says that only this pool knows it. Views on it, dictionaries, torch tensors and messages
that libzmq has not sent yet all hold such references, so a batch stays the caller's own for as long as it is
kept.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Entry = tuple[Array, int]

KEPT = 32  # arrays of one shape; more than that are somebody's collection, not batches on their way


class Recycler:
    """Memory that is remembered. Each array owns its memory: so views on it hold it, not something below."""

    def __init__(self) -> None:
        self._pools: defaultdict[tuple[tuple[int, ...], np.dtype[Any]], list[Entry]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Entry:
        """An array with any contents, and its address."""
        pool = self._pools[shape, dtype]
        for entry in pool:
            if sys.getrefcount(entry[0]) == _UNHELD:
                return entry[0], entry[1]  # never the pool's own pair: who keeps that does not hold the array
        array = np.zeros(shape, dtype)  # the gaps of a block travel too: nothing of old memory may be in them
        address = array.ctypes.data
        if len(pool) < KEPT:
            pool.append((array, address))
        return array, address


def _references_when_unheld() -> int:
    """What `getrefcount` says, asked as above, of an array that only a pool holds."""
    entry = (np.empty(1), 0)
    return sys.getrefcount(entry[0])


_UNHELD = _references_when_unheld()
