"""The compiled inner loops of replay: walking the sum tree, and assembling batches from packed rows.

numba compiles them once for a machine and keeps the result beside this file (or where NUMBA_CACHE_DIR says);
`python -m services.replay.compile` does it ahead of time, so that no run has to wait for it. They know
nothing of files or messages: arrays in, arrays out.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FAN_OUT = 16
FAN_OUT_BITS = 4

Array = npt.NDArray[Any]


@numba.njit(cache=True, nogil=True)
def tree_assign(tree: Array, offsets: Array, indices: Array, values: Array) -> None:
    """Sets leaves (of one that occurs twice the last value stays) and recomputes every sum above them."""
    for i in range(len(indices)):
        tree[offsets[0] + indices[i]] = values[i]
    for level in range(1, len(offsets)):
        last = -1
        for i in range(len(indices)):
            node = indices[i] >> (FAN_OUT_BITS * level)
            if node != last:  # stratified draws come sorted: neighbours share their parents
                start = offsets[level - 1] + node * FAN_OUT
                total = 0.0
                for child in range(FAN_OUT):
                    total += tree[start + child]
                tree[offsets[level] + node] = total
                last = node


@numba.njit(cache=True, nogil=True)
def tree_sum_up(tree: Array, offsets: Array, start: int, stop: int) -> None:
    """Recomputes every sum above the leaves start to stop."""
    for level in range(1, len(offsets)):
        start, stop = start >> FAN_OUT_BITS, ((stop - 1) >> FAN_OUT_BITS) + 1
        for node in range(start, stop):
            first = offsets[level - 1] + node * FAN_OUT
            total = 0.0
            for child in range(FAN_OUT):
                total += tree[first + child]
            tree[offsets[level] + node] = total


@numba.njit(cache=True, nogil=True)
def tree_draw(tree: Array, offsets: Array, targets: Array, found: Array) -> None:
    """For each target in [0, total) the leaf whose share of the running sum holds it.

    Level by level for the whole batch: the loads of different rows overlap instead of waiting for each
    other. Rounding may carry a target past the last child; then the last child above 0 takes it, so a leaf of
    value 0 is never found.
    """
    rest = targets.copy()
    found[:] = 0
    for level in range(len(offsets) - 1, -1, -1):
        for i in range(len(rest)):
            start = offsets[level] + found[i] * FAN_OUT
            before, chosen, chosen_before = 0.0, 0, 0.0
            for child in range(FAN_OUT):
                value = tree[start + child]
                if value > 0.0:
                    chosen, chosen_before = child, before
                    before += value
                    if rest[i] < before:
                        break
            rest[i] -= chosen_before
            found[i] = found[i] * FAN_OUT + chosen


@numba.njit(cache=True, nogil=True)
def locate(
    index: Array,
    segment_steps: int,
    n_step: int,
    slot_rows: int,
    before: Array,
    rows: Array,
    generation: Array,
    flat: Array,
    ahead: Array,
    in_slot: Array,
    generations: Array,
) -> None:
    """Where each drawn step lies: its row in the file, its row in its slot, how far its return reaches."""
    for i in range(len(index)):
        slot = index[i] // segment_steps
        row = before[slot] + index[i] - slot * segment_steps
        in_slot[i] = row
        flat[i] = slot * slot_rows + row
        ahead[i] = min(n_step, rows[slot] - 1 - row)
        generations[i] = generation[slot]


@intrinsic
def _copy_bytes(_context: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy between two addresses: numba's own loops over bytes are ten times slower."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, of, size = arguments
        cgutils.raw_memcpy(  # type: ignore[no-untyped-call]
            builder, builder.inttoptr(to, byte), builder.inttoptr(of, byte), size, 1
        )
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), generate


@numba.njit(cache=True, nogil=True)
def gather_stacks(
    packed: Array, frame_bytes: int, flat: Array, in_slot: Array, ahead: Array, now: Array, later: Array
) -> None:
    """The frames up to each step, and up to the step its return ends at: bytes, [batch, stack * frame_bytes].

    A row begins with its observation. A segment carries every frame that exists of its stacks, so a row below
    its slot's first one stands for a time before the episode began: zeros.
    """
    stack = now.shape[1] // frame_bytes
    row_bytes = packed.shape[1]
    rows, nows, laters = packed.ctypes.data, now.ctypes.data, later.ctypes.data
    for i in range(len(flat)):
        for frame in range(stack):
            back = stack - 1 - frame
            to = i * stack * frame_bytes + frame * frame_bytes
            if in_slot[i] >= back:
                source = rows + (flat[i] - back) * row_bytes
                _copy_bytes(nows + to, source, frame_bytes)  # type: ignore[call-arg]
            else:
                now[i, frame * frame_bytes : (frame + 1) * frame_bytes] = 0
            if in_slot[i] + ahead[i] >= back:
                source = rows + (flat[i] + ahead[i] - back) * row_bytes
                _copy_bytes(laters + to, source, frame_bytes)  # type: ignore[call-arg]
            else:
                later[i, frame * frame_bytes : (frame + 1) * frame_bytes] = 0


@numba.njit(cache=True, nogil=True)
def sum_returns(
    reward: Array,
    terminated: Array,
    powers: Array,
    flat: Array,
    ahead: Array,
    returns: Array,
    discounts: Array,
) -> None:
    """n-step returns over `ahead` steps, and gamma^ahead, 0 where the last of them terminated."""
    for i in range(len(flat)):
        total = 0.0
        for k in range(ahead[i]):
            total += powers[k] * reward[flat[i] + k]
        returns[i] = total
        discounts[i] = 0.0 if terminated[flat[i] + ahead[i] - 1] else powers[ahead[i]]


@numba.njit(cache=True, nogil=True)
def accept_priorities(
    index: Array,
    generation: Array,
    priority: Array,
    commit: Array,
    owned: Array,
    raw: Array,
    accepted: Array,
    kept: Array,
) -> int:
    """Stores the priorities of rows that still are what was drawn; how many: see `accepted` and `kept`."""
    segment_steps = raw.shape[1]
    capacity = raw.shape[0] * segment_steps
    count = 0
    for i in range(len(index)):
        if index[i] < 0 or index[i] >= capacity:
            continue
        slot = index[i] // segment_steps
        step = index[i] - slot * segment_steps
        fresh = generation[i] != 0 and generation[i] == commit[slot] and step < owned[slot]
        if fresh and np.isfinite(priority[i]) and priority[i] >= 0:
            raw[slot, step] = priority[i]
            accepted[count] = index[i]
            kept[count] = priority[i]
            count += 1
    return count
