"""The compiled loops over one slot of the ring: checking a segment, storing it stage by stage, reading it.

Storing knows the ring's files by addresses (`RING_ADDRESSES`), because handing numba an array takes longer
than most of what is done with it here. The order of the stages is what survives a `kill -9`: between any two
of them stands a fence, and the last is one 8-byte store.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from services.replay.intrinsics import (
    FAN_OUT,
    copy_bytes,
    fence,
    load_byte,
    load_float,
    load_int,
    store_double,
    store_float,
    store_word,
    sum_floats,
    sum_running,
)
from services.replay.kernels import FAN_OUT_BITS

Array = npt.NDArray[Any]

# The stages of storing a segment, in their order.
STAGES = ("invalidate", "write_rows", "write_metadata", "write_priorities", "commit")
_INVALIDATE, _WRITE_ROWS, _WRITE_METADATA, _WRITE_PRIORITIES, _COMMIT = range(len(STAGES))
ALL_STAGES = len(STAGES)

# Where the ring's arrays begin, and what is needed to find a slot in them.
RING_ADDRESSES = ("rows", "metadata", "priorities", "commit", "places")
_ROWS, _METADATA, _PRIORITIES, _COMMITS, _PLACES = range(len(RING_ADDRESSES))
RING_SIZES = ("row_bytes", "slot_rows", "metadata_bytes", "priority_bytes", "segment_steps")
_ROW_BYTES, _SLOT_ROWS, _METADATA_BYTES, _PRIORITY_BYTES, _SEGMENT_STEPS = range(5, 5 + len(RING_SIZES))
WORD_BYTES, PLACE_BYTES = 8, 16

# A record of metadata as words: the fourth is the generation, the tenth before and owned, the next rows.
_GENERATION, _BEFORE_AND_OWNED, _ROWS_USED = 3, 9, 10


@numba.njit(cache=True, nogil=True)
def store_segment(
    ring: Array,
    tree: Array,
    columns: Array,
    block: Array,
    record: Array,
    slot: int,
    priority: float,
    leaf: float,
    stop_at: int,
) -> None:
    """Puts a segment into a slot, whatever is in it, and commits it. Its steps' leaves are 0 until then.

    `columns` says for each column where it lies in the block, where in a row, its bytes in a row and its
    rows; `record` is the metadata. Before the stage `stop_at` it stops as a death would: only in tests.
    """
    place, commit = ring[_PLACES] + slot * PLACE_BYTES, ring[_COMMITS] + slot * WORD_BYTES
    if stop_at == _INVALIDATE:
        return
    first_leaf = slot * ring[_SEGMENT_STEPS]
    _set_leaves(tree, first_leaf, ring[_SEGMENT_STEPS], 0, np.float32(0.0))
    store_word(commit, 0)
    store_word(place, 0)
    fence()
    if stop_at == _WRITE_ROWS:
        return
    _store_rows(ring[_ROWS] + slot * ring[_SLOT_ROWS] * ring[_ROW_BYTES], ring[_ROW_BYTES], columns, block)
    fence()
    if stop_at == _WRITE_METADATA:
        return
    copy_bytes(ring[_METADATA] + slot * ring[_METADATA_BYTES], record.ctypes.data, ring[_METADATA_BYTES])
    fence()
    if stop_at == _WRITE_PRIORITIES:
        return
    first = ring[_PRIORITIES] + slot * ring[_PRIORITY_BYTES]
    for step in range(ring[_SEGMENT_STEPS]):
        store_float(first + WORD_BYTES + step * 4, priority)
    store_word(first, record[_GENERATION])
    fence()
    if stop_at == _COMMIT:
        return
    store_word(commit, record[_GENERATION])
    before, owned = record[_BEFORE_AND_OWNED] & np.uint64(0xFFFF), record[_BEFORE_AND_OWNED] >> np.uint64(32)
    rows = record[_ROWS_USED] & np.uint64(0xFFFF)
    store_word(place, record[_GENERATION])
    store_word(place + WORD_BYTES, before | owned << np.uint64(16) | rows << np.uint64(32))
    _set_leaves(tree, first_leaf, ring[_SEGMENT_STEPS], int(owned), np.float32(leaf))


@numba.njit(inline="always")
def _set_leaves(tree: Array, start: int, count: int, used: int, leaf: np.float32) -> None:
    """The first `used` of these leaves to one value, the others to 0, and the sums above them anew."""
    leaves, sums, running = tree[0], tree[1], tree[2]
    for place in range(count):
        store_float(leaves + (start + place) * 4, leaf if place < used else np.float32(0.0))
    first, last = start >> FAN_OUT_BITS, (start + count - 1) >> FAN_OUT_BITS
    for family in range(first, last + 1):
        store_double(sums + family * 8, sum_floats(leaves + family * FAN_OUT * 4))
    for level in range(3, len(tree)):
        first, last = first >> FAN_OUT_BITS, last >> FAN_OUT_BITS
        for family in range(first, last + 1):
            at = (tree[level] + family * FAN_OUT) * 8
            total = sum_running(sums + at, running + at)
            if level + 1 < len(tree):
                store_double(sums + (tree[level + 1] + family) * 8, total)


@numba.njit(inline="always")
def _store_rows(rows: int, row_bytes: int, columns: Array, block: Array) -> None:
    """Column after column; the usual sizes of numbers without a call for each."""
    base = block.ctypes.data
    for column in range(len(columns)):
        source, target = base + columns[column, 0], rows + columns[column, 1]
        size, count = columns[column, 2], columns[column, 3]
        if size == 8:
            for row in range(count):
                copy_bytes(target + row * row_bytes, source + row * 8, 8)
        elif size == 4:
            for row in range(count):
                copy_bytes(target + row * row_bytes, source + row * 4, 4)
        elif size == 1:
            for row in range(count):
                copy_bytes(target + row * row_bytes, source + row, 1)
        else:
            for row in range(count):
                copy_bytes(target + row * row_bytes, source + row * size, size)


@numba.njit(cache=True, nogil=True)
def read_segment(rows: Array, columns: Array, block: Array) -> None:
    """And back: what lies in a slot's rows, as it travelled."""
    base, row_bytes, target = rows.ctypes.data, rows.shape[1], block.ctypes.data
    for column in range(len(columns)):
        size = columns[column, 2]
        for row in range(columns[column, 3]):
            copy_bytes(
                target + columns[column, 0] + row * size, base + row * row_bytes + columns[column, 1], size
            )


ENDS_EARLY, ACTION_OUTSIDE, REWARD_NOT_FINITE = 1, 2, 3
CHECKED = ("terminated", "truncated", "reward", "action")  # where they lie in the block; then steps, actions


@numba.njit(cache=True, nogil=True)
def flaw_of(block: Array, checked: Array) -> int:
    """What is wrong with these steps, by the numbers above; 0: nothing. Without actions none is wrong."""
    base = block.ctypes.data
    terminated, truncated, reward = base + checked[0], base + checked[1], base + checked[2]
    action, steps, actions = base + checked[3], checked[4], checked[5]
    for step in range(steps):
        if step < steps - 1 and (load_byte(terminated + step) or load_byte(truncated + step)):
            return ENDS_EARLY
        if not np.isfinite(load_float(reward + step * 4)):
            return REWARD_NOT_FINITE
    if actions:
        for step in range(steps):
            chosen = load_int(action + step * 8)
            if chosen < 0 or chosen >= actions:
                return ACTION_OUTSIDE
    return 0
