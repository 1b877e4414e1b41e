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
from numba import carray  # type: ignore[attr-defined]  # it is missing from its list of names

from services.replay.intrinsics import (
    FAN_OUT,
    at_address,
    copy_bytes,
    count_at_most,
    count_sums_at_most,
    prefetch,
    prefetch_once,
    sum_floats,
    sum_running,
    zero_bytes,
)

FAN_OUT_BITS = 4
LINE_BYTES = 64
ROWS_AHEAD = 8  # how far the fetching of rows runs ahead of their copying: measured best of 2 to 16
FETCHED_BYTES = 2048  # of one row: beyond that the hardware sees the pattern by itself

Array = npt.NDArray[Any]

# --- random numbers ---------------------------------------------------------------------------------------


@numba.njit(inline="always")
def _mixed(word: np.uint64) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def stratified_targets(key: Array, draw: int, total: float, targets: Array) -> None:
    """One number in each of `len(targets)` equal parts of [0, total); a pure function of key and draw."""
    word = _mixed(key[0] ^ _mixed(key[1] + np.uint64(draw)))
    part = total / len(targets)
    for i in range(len(targets)):
        word += np.uint64(0x9E3779B97F4A7C15)
        fraction = np.float64(_mixed(word) >> np.uint64(11)) * 2.0**-53
        targets[i] = (i + fraction) * part


# --- the sum tree -----------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def tree_assign(
    leaves: Array, sums: Array, running: Array, offsets: Array, indices: Array, values: Array
) -> None:
    """Sets leaves (of one that occurs twice the last value stays) and recomputes every sum above them."""
    leaf_address, sum_address, running_address = leaves.ctypes.data, sums.ctypes.data, running.ctypes.data
    for i in range(len(indices)):
        prefetch(leaf_address + indices[i] * 4)
        prefetch(sum_address + (indices[i] >> FAN_OUT_BITS) * 8)
    for i in range(len(indices)):
        leaves[indices[i]] = values[i]
    last = -1
    for i in range(len(indices)):
        family = indices[i] >> FAN_OUT_BITS
        if family != last:  # stratified draws come sorted: neighbours share their parents
            sums[family] = sum_floats(leaf_address + family * FAN_OUT * 4)
            last = family
    for level in range(len(offsets)):
        last = -1
        for i in range(len(indices)):
            family = indices[i] >> (FAN_OUT_BITS * (level + 2))
            if family != last:
                first = (offsets[level] + family * FAN_OUT) * 8
                total = sum_running(sum_address + first, running_address + first)
                if level + 1 < len(offsets):
                    sums[offsets[level + 1] + family] = total
                last = family


@numba.njit(cache=True, nogil=True)
def tree_sum_up(leaves: Array, sums: Array, running: Array, offsets: Array, start: int, stop: int) -> None:
    """Recomputes every sum above the leaves start to stop."""
    start, stop = start >> FAN_OUT_BITS, ((stop - 1) >> FAN_OUT_BITS) + 1
    for family in range(start, stop):
        sums[family] = sum_floats(leaves.ctypes.data + family * FAN_OUT * 4)
    for level in range(len(offsets)):
        start, stop = start >> FAN_OUT_BITS, ((stop - 1) >> FAN_OUT_BITS) + 1
        for family in range(start, stop):
            first = (offsets[level] + family * FAN_OUT) * 8
            total = sum_running(sums.ctypes.data + first, running.ctypes.data + first)
            if level + 1 < len(offsets):
                sums[offsets[level + 1] + family] = total


@numba.njit(cache=True, nogil=True)
def tree_draw(
    leaves: Array, running: Array, offsets: Array, targets: Array, found: Array, values: Array
) -> float:
    """For each target in [0, total) the leaf whose share of the running sum holds it, and that leaf's value.

    Level by level for the whole batch: the loads of different rows overlap instead of waiting for each
    other. Rounding may carry a target past the last child; then the last child above 0 takes it, so a leaf of
    value 0 is never found. Uses up `targets`; returns the smallest value.
    """
    leaf_address, running_address = leaves.ctypes.data, running.ctypes.data
    found[:] = 0
    for level in range(len(offsets) - 1, -1, -1):
        for i in range(len(found)):
            first = offsets[level] + found[i] * FAN_OUT
            child = count_at_most(running_address + first * 8, targets[i])
            if child == FAN_OUT:
                child -= 1
                while child > 0 and running[first + child - 1] == running[first + FAN_OUT - 1]:
                    child -= 1
            if child > 0:
                targets[i] -= running[first + child - 1]
            found[i] = found[i] * FAN_OUT + child
            if level == 0:
                prefetch(leaf_address + found[i] * FAN_OUT * 4)
    smallest = np.inf
    for i in range(len(found)):
        first = found[i] * FAN_OUT
        child = count_sums_at_most(leaf_address + first * 4, targets[i])
        if child == FAN_OUT or leaves[first + child] <= 0.0:
            child = _leaf_in_doubt(leaves, first, targets[i])
        found[i] = first + child
        values[i] = leaves[first + child]
        smallest = min(smallest, values[i])
    return smallest


@numba.njit(cache=True, nogil=True)
def _leaf_in_doubt(leaves: Array, first: int, target: float) -> int:
    """At a border, where the order of additions matters: one leaf after another, never one of value 0."""
    before, chosen = 0.0, 0
    for child in range(FAN_OUT):
        value = np.float64(leaves[first + child])
        if value > 0.0:
            chosen = child
            before += value
            if target < before:
                break
    return chosen


# --- batches ----------------------------------------------------------------------------------------------


@numba.njit(inline="always")
def _fetch(start: int, stop: int) -> None:
    for address in range(start, min(stop, start + FETCHED_BYTES), LINE_BYTES):
        prefetch_once(address)


@numba.njit(cache=True, nogil=True)
def gather(
    packed: Array,
    reward: Array,
    terminated: Array,
    places: Array,
    powers: Array,
    fields: Array,
    block: int,
    offsets: Array,
    segment_steps: int,
    slot_rows: int,
    stack: int,
    frame_bytes: int,
    index: Array,
    generation: Array,
    returns: Array,
    discounts: Array,
) -> None:
    """Everything of the drawn steps but their weights.

    A row of `packed` begins with its observation. The frames up to each step go to the address `block` plus
    offsets[0], those up to the step where its return ends to offsets[1]; then for each (offset, bytes) of
    `fields` that part of the row to the next of the offsets. The return is over n steps or as many as there
    are, the discount gamma to that number, or 0 where the last of them terminated.
    """
    size, n_step, row_bytes, base = len(index), len(powers) - 1, packed.shape[1], packed.ctypes.data
    row = np.empty(size, np.int64)
    in_slot = np.empty(size, np.int64)
    ahead = np.empty(size, np.int64)
    for i in range(size):
        slot = index[i] // segment_steps
        place = places[slot]
        in_slot[i] = np.int64(place.before) + index[i] - slot * segment_steps
        row[i] = slot * slot_rows + in_slot[i]
        ahead[i] = min(n_step, np.int64(place.rows) - 1 - in_slot[i])
        generation[i] = place.generation
    for i in range(size):
        if i + ROWS_AHEAD < size:
            j = i + ROWS_AHEAD
            earliest = row[j] - min(stack - 1, in_slot[j])
            if ahead[j] <= stack:
                _fetch(base + earliest * row_bytes, base + (row[j] + ahead[j]) * row_bytes + frame_bytes)
            else:
                _fetch(base + earliest * row_bytes, base + (row[j] + 1) * row_bytes)
                later = row[j] + ahead[j]
                _fetch(base + (later - stack + 1) * row_bytes, base + later * row_bytes + frame_bytes)
        _copy_stack(base, row_bytes, row[i], in_slot[i], stack, frame_bytes, block + offsets[0], i)
        later, later_in_slot = row[i] + ahead[i], in_slot[i] + ahead[i]
        _copy_stack(base, row_bytes, later, later_in_slot, stack, frame_bytes, block + offsets[1], i)
        for field in range(len(fields)):
            start, count = fields[field, 0], fields[field, 1]
            copy_bytes(block + offsets[2 + field] + i * count, base + row[i] * row_bytes + start, count)
        total = 0.0
        for k in range(ahead[i]):
            total += powers[k] * reward[row[i] + k]
        returns[i] = total
        discounts[i] = 0.0 if terminated[row[i] + ahead[i] - 1] else powers[ahead[i]]


@numba.njit(cache=True, nogil=True)
def draw(
    key: Array,
    number: int,
    size: int,
    leaves: Array,
    running: Array,
    levels: Array,
    packed: Array,
    reward: Array,
    terminated: Array,
    places: Array,
    powers: Array,
    fields: Array,
    block: int,
    offsets: Array,
    shape: Array,
) -> None:
    """Draw `number` of `size` steps, all of it but one power of its weights: those are P over the smallest P.

    The same as `stratified_targets`, `tree_draw` and `gather`, one after another, in one call: each call and
    each array that is passed costs a fifth of a microsecond. `shape` is what `gather` takes as numbers; the
    computed arrays are the last five of the block: return, discount, weight, index, generation. The block may
    be memory that a learner lends and could write to: nothing that is read from it becomes an address.
    """
    segment_steps, slot_rows, stack, frame_bytes = shape[0], shape[1], shape[2], shape[3]
    computed = 2 + len(fields)
    returns = carray(at_address(block + offsets[computed]), size, np.float32)
    discounts = carray(at_address(block + offsets[computed + 1]), size, np.float32)
    weight = carray(at_address(block + offsets[computed + 2]), size, np.float32)
    index = carray(at_address(block + offsets[computed + 3]), size, np.int64)
    generation = carray(at_address(block + offsets[computed + 4]), size, np.uint64)
    targets, found = np.empty(size), np.empty(size, np.int64)
    stratified_targets(key, number, running[len(running) - 1], targets)
    smallest = np.float32(tree_draw(leaves, running, levels, targets, found, weight))
    gather(
        packed,
        reward,
        terminated,
        places,
        powers,
        fields,
        block,
        offsets,
        segment_steps,
        slot_rows,
        stack,
        frame_bytes,
        found,
        generation,
        returns,
        discounts,
    )
    for i in range(size):
        index[i] = found[i]
        weight[i] /= smallest


@numba.njit(inline="always")
def _copy_stack(
    base: int, row_bytes: int, row: int, in_slot: int, stack: int, frame_bytes: int, output: int, i: int
) -> None:
    """A segment carries every frame that exists of its stacks, so a row below its slot's first one stands for
    a time before the episode began: zeros."""
    to = output + i * stack * frame_bytes
    for back in range(stack - 1, -1, -1):
        if in_slot >= back:
            copy_bytes(to, base + (row - back) * row_bytes, frame_bytes)
        else:
            zero_bytes(to, frame_bytes)
        to += frame_bytes


# --- priorities -------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def accept_priorities(
    index: Array,
    generation: Array,
    priority: Array,
    places: Array,
    raw: Array,
    accepted: Array,
    kept: Array,
) -> tuple[int, float]:
    """Stores the priorities of rows that still are what was drawn, and lists them in `accepted` and `kept`.

    How many they are, and the largest of them.
    """
    segment_steps = raw.shape[1]
    capacity = raw.shape[0] * segment_steps
    count, highest = 0, 0.0
    for i in range(len(index)):
        if index[i] < 0 or index[i] >= capacity:
            continue
        slot = index[i] // segment_steps
        step = index[i] - slot * segment_steps
        place = places[slot]
        fresh = generation[i] != 0 and generation[i] == place.generation and step < place.owned
        value = np.float32(priority[i])
        if fresh and np.isfinite(value) and value >= 0:
            raw[slot, step] = value
            accepted[count] = index[i]
            kept[count] = value
            count += 1
            highest = np.maximum(highest, value)
    return count, highest
