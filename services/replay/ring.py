"""Owns one agent's stored rows: a ring of segment slots in memory-mapped files that outlive the process.

A slot is made invalid first, then come its rows, then its metadata, and it becomes valid with one 8-byte
store of its generation: that is the commit. After `kill -9` the operating system still has every byte;
`recover` checks each slot against its checksum and drops what does not fit. One process at a time opens it.

Next: services/learner/service.py
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from services.replay import slot_kernels
from services.replay.sum_tree import SumTree
from shared.codec import segment_checksum, segment_layout
from shared.errors import ConfigError
from shared.layout import Layout, Packed
from shared.segment_frame import AnySegment
from shared.specs import AgentSpec, Column

log = structlog.get_logger(__name__)

WORD_BYTES = 8

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

METADATA = np.dtype(
    [
        ("incarnation", "<u8", (2,)),
        ("sequence", "<u8"),
        ("generation", "<u8"),
        ("stored_after", "<u8"),  # steps of this stream that are stored once this segment is
        ("produced_after", "<u8"),  # what its actor said it had produced by then
        ("actor_index", "<u8"),
        ("env_slot", "<u8"),
        ("epoch", "<u8"),
        ("before", "<u4"),
        ("owned", "<u4"),
        ("rows", "<u4"),
        ("unused", "<u4"),
        ("checksum", "<u8"),
    ]
)
_METADATA_STRUCT = struct.Struct("<9Q4IQ")  # the same, for writing one at once
assert _METADATA_STRUCT.size == METADATA.itemsize
# What drawing needs of a slot, four slots to a cache line; in memory only, generation 0 where it is invalid.
PLACE = np.dtype(
    [("generation", "<u8"), ("before", "<u2"), ("owned", "<u2"), ("rows", "<u2"), ("unused", "<u2")]
)
STATE = np.dtype(
    [
        ("openings", "<u8"),
        ("max_priority", "<f8"),
        ("sampled_steps", "<u8"),
        ("token", "<u8"),
        ("duplicates_dropped", "<u8"),
        ("gaps_dropped", "<u8"),
        ("stale_priorities", "<u8"),
        ("damaged_slots", "<u8"),
        ("limiter_offset", "<f8"),
        ("samples_per_insert", "<f8"),
        ("min_steps", "<u8"),
        # What the config said when the two above were last set: while it says the same, they stay.
        ("config_samples_per_insert", "<f8"),
        ("config_min_steps", "<u8"),
    ]
)


def map_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, huge_pages: bool = False) -> Array:
    """The file as an array, made (zeros) or extended to the size it needs.

    The space is claimed now: a write into a mapped file on a full disk would kill the process later.
    """
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, size)
        _claim_space(path, handle, size)
        mapped = mmap.mmap(handle, size)
        if huge_pages:
            _ask_for_huge_pages(mapped)
        return np.ndarray(shape, dtype, buffer=mapped)
    finally:
        os.close(handle)


def _ask_for_huge_pages(mapped: mmap.mmap) -> None:
    """Rows are drawn from all over a file of gigabytes: with pages of 2 MiB, where the kernel has them for
    files, the processor finds nearly every row's page at once. Without them it is only slower."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            mapped.madvise(mmap.MADV_HUGEPAGE)


def _claim_space(path: Path, handle: int, size: int) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        raise ConfigError(
            f"no room for {size:,} bytes in {path}: {error.strerror}; "
            "free some, or lower replay.capacity_steps"
        ) from None


def sync_file(path: Path) -> None:
    """Puts a file's mapped pages on the disk; from any thread, since it only needs the path."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)


def row_dtype(spec: AgentSpec) -> np.dtype[Any]:
    """One row with all its columns: the observation first, then the steps' from wide to narrow, no gaps but
    at the end, where it is filled up to whole 8-byte words."""
    observation, steps = spec.observation_columns, spec.step_columns
    ordered = [*observation, *sorted(steps, key=lambda column: -column.dtype.numpy.itemsize)]
    offsets, at = [], 0
    for column in ordered:
        at = -(-at // column.dtype.numpy.itemsize) * column.dtype.numpy.itemsize
        offsets.append(at)
        at += column.row_bytes
    return np.dtype(
        {
            "names": [column.name for column in ordered],
            "formats": [(column.dtype.numpy, column.shape) for column in ordered],
            "offsets": offsets,
            "itemsize": -(-at // WORD_BYTES) * WORD_BYTES,
        }
    )


@lru_cache(maxsize=1024)
def incarnation_words(incarnation: str) -> tuple[int, int]:
    """The 32 hex digits as the two numbers that are stored."""
    return int(incarnation[:16], 16), int(incarnation[16:], 16)


def incarnation_text(words: Array) -> str:
    """And back."""
    return f"{int(words[0]):016x}{int(words[1]):016x}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Segments with so many rows: how they travel, where each column goes, and what is checked of it."""

    layout: Layout
    columns: Ints  # for slot_kernels.store_segment
    checked: Ints  # for slot_kernels.flaw_of


class State:
    """The few numbers of an agent that must outlive the process, each updated in place with one store."""

    def __init__(self, path: Path) -> None:
        self._record = map_array(path, STATE, (1,))
        # Views of bytes, not arrays: they give and take plain numbers in a quarter of the time.
        self._fields: dict[str, Any] = {name: self._record[name].data for name in STATE.names or ()}

    def __getitem__(self, name: str) -> Any:
        return self._fields[name][0]

    def __setitem__(self, name: str, value: float) -> None:
        self._fields[name][0] = value

    def as_bytes(self) -> bytes:
        """As the file has them now."""
        return self._record.tobytes()


class Watcher(Protocol):
    """Somebody who must see slots before they change: a snapshot that is being taken."""

    def before_insert(self, slot: int) -> None: ...

    def before_update(self, slots: Ints) -> None: ...


class Ring:
    """`slots` segments of one agent, the newest overwriting the oldest."""

    def __init__(self, directory: Path, spec: AgentSpec, slots: int, segment_steps: int, n_step: int) -> None:
        self.directory, self.spec = directory, spec
        self.slots, self.segment_steps, self.n_step = slots, segment_steps, n_step
        self.slot_rows = (spec.stack - 1) + segment_steps + n_step
        directory.mkdir(parents=True, exist_ok=True)
        _check_layout(directory / "layout.json", spec, slots, segment_steps, n_step)
        # All columns of a row lie together: a drawn row is one place in memory, not one for each column.
        packed = row_dtype(spec)
        rows = map_array(directory / "rows", packed, (slots * self.slot_rows,), huge_pages=True)
        self.columns = {column.name: rows[column.name] for column in spec.columns}
        self.packed = rows.view(np.uint8).reshape(len(rows), packed.itemsize)
        self.metadata = map_array(directory / "metadata", METADATA, (slots,))
        self.commit = map_array(directory / "commit", np.dtype("<u8"), (slots,))
        priority = np.dtype([("generation", "<u8"), ("raw", "<f4", (segment_steps,))], align=True)
        self.priority_records = map_array(directory / "priorities", priority, (slots,))
        self.priority_generation = self.priority_records["generation"]
        self.priorities = self.priority_records["raw"]
        self._actions = spec.discrete.n if spec.discrete else 0
        self._plans: dict[int, _Plan] = {}  # of segments, by their rows
        self.places = np.zeros(slots, PLACE)
        self._place_generation, self._owned = self.places["generation"], self.places["owned"]
        self._table = self._make_table()
        self._record = np.empty(METADATA.itemsize // WORD_BYTES, np.uint64)  # the metadata of one segment
        self._store = slot_kernels.store_segment
        self._valid = 0  # slots that hold a segment
        self.watcher: Watcher | None = None
        self.state = State(directory / "state")
        self.generation = 0
        self.next_slot = 0
        self.recover()

    # --- writing ------------------------------------------------------------------------------------------

    def insert(
        self,
        segment: AnySegment,
        arrays: Packed,
        *,
        stored_after: int,
        priority: float,
        tree: SumTree,
        leaf: float,
    ) -> int:
        """Puts a segment in the place of the oldest and commits it; how many steps had to go.

        Nothing of the oldest can be drawn from the first moment on, whatever comes: its leaves in the tree
        are 0 then. At the end those of the new steps are `leaf`.
        """
        slot = self.next_slot
        freed = self.steps_in(slot)
        if self.watcher is not None:
            self.watcher.before_insert(slot)
        self.generation += 1
        self._describe(segment, stored_after)
        self._store(
            self._table,
            tree.table,
            self._plan(segment.rows).columns,
            arrays.block,
            self._record,
            slot,
            priority,
            leaf,
            slot_kernels.ALL_STAGES,
        )
        if not freed:
            self._valid += 1
        self.next_slot = (slot + 1) % self.slots
        return freed

    def _describe(self, segment: AnySegment, stored_after: int) -> None:
        """The metadata, in the order of METADATA."""
        _METADATA_STRUCT.pack_into(
            self._record.data,
            0,
            *incarnation_words(segment.incarnation),
            segment.sequence,
            self.generation,
            stored_after,
            segment.produced_steps,
            segment.actor_index,
            segment.slot,
            segment.epoch,
            segment.before,
            segment.owned,
            segment.rows,
            0,
            segment.checksum,
        )

    @property
    def full(self) -> bool:
        """Whether every slot holds a segment."""
        return self._valid == self.slots

    def steps_in(self, slot: int) -> int:
        """How many steps can be drawn from it."""
        return int(self._owned[slot]) if self.commit[slot] else 0

    def _invalidate(self, slot: int) -> None:
        self.commit[slot] = 0
        self._place_generation[slot] = 0

    def _make_table(self) -> Ints:
        """The ring as `slot_kernels.store_segment` knows it."""
        addresses = {name: getattr(self, name).ctypes.data for name in ("metadata", "commit", "places")}
        addresses |= {"rows": self.packed.ctypes.data, "priorities": self.priority_records.ctypes.data}
        sizes = {
            "row_bytes": self.packed.shape[1],
            "slot_rows": self.slot_rows,
            "metadata_bytes": METADATA.itemsize,
            "priority_bytes": self.priority_records.itemsize,
            "segment_steps": self.segment_steps,
        }
        entries = [addresses[name] for name in slot_kernels.RING_ADDRESSES]
        return np.array([*entries, *(sizes[name] for name in slot_kernels.RING_SIZES)], np.int64)

    # --- coming back --------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Drops damaged slots and finds where to go on."""
        for slot in self.valid_slots().tolist():
            if problem := self._problem(slot):
                self._invalidate(slot)
                self.state["damaged_slots"] += 1
                log.warning("slot dropped", directory=self.directory.name, slot=slot, problem=problem)
        valid = self.valid_slots()
        self._valid = len(valid)
        for name in ("generation", "before", "owned", "rows"):
            self.places[name][valid] = self.metadata[name][valid]
        newest = valid[self.commit[valid].argmax()] if valid.size else -1
        self.next_slot = (int(newest) + 1) % self.slots
        self._start_generations()

    def _start_generations(self) -> None:
        # A learner may hold generations of slots that a power cut took back, so the metadata alone cannot say
        # which were given out. Each opening gets a number of its own, on the disk before the first insert;
        # it is the upper half of the generations that follow.
        highest = int(self.metadata["generation"].max()) >> 32
        self.state["openings"] = max(self.state["openings"], highest) + 1
        sync_file(self.directory / "state")
        self.generation = self.state["openings"] << 32

    def _problem(self, slot: int) -> str:
        record = self.metadata[slot]
        before, owned, rows = (int(record[name]) for name in ("before", "owned", "rows"))
        if record["generation"] != self.commit[slot]:
            return f"generation {record['generation']} under commit {self.commit[slot]}"
        if problem := self.misfit(before, owned, rows):
            return problem
        found = segment_checksum(self.slot_arrays(slot))
        return "" if found == record["checksum"] else f"checksum {found}, not {record['checksum']}"

    def misfit(self, before: int, owned: int, rows: int) -> str:
        """Why a segment of these lengths does not fit into a slot; empty if it does."""
        if not 0 <= before <= self.spec.stack - 1:
            return (
                f"{before} rows before the owned ones, where at most stack - 1 = {self.spec.stack - 1} can be"
            )
        if not 1 <= owned <= self.segment_steps:
            return f"{owned} owned steps, where 1 to {self.segment_steps} can be"
        after = rows - before - owned
        if not 1 <= after <= self.n_step:
            return f"{after} rows after the owned ones, where 1 to n_step = {self.n_step} can be"
        return ""

    def slot_arrays(self, slot: int) -> Packed:
        """A slot's arrays as they came over the wire: a copy."""
        plan = self._plan(int(self.metadata["rows"][slot]))
        block = np.zeros(plan.layout.nbytes, np.uint8)
        rows = self.packed[slot * self.slot_rows : (slot + 1) * self.slot_rows]
        slot_kernels.read_segment(rows, plan.columns, block)
        return Packed(plan.layout, block)

    def segment_layout(self, rows: int) -> Layout:
        """What the arrays of a segment with so many rows must be."""
        return self._plan(rows).layout

    def flaw(self, packed: Packed, rows: int) -> str:
        """Why no learner could train on these rows, which must not be drawn again and again; else empty."""
        flaw = slot_kernels.flaw_of(packed.block, self._plan(rows).checked)
        if flaw == slot_kernels.ENDS_EARLY:
            return "it goes on after the end of its episode"
        if flaw == slot_kernels.ACTION_OUTSIDE:
            return f"an action outside 0 to {self._actions - 1}"
        return "a reward that is not finite" if flaw else ""

    def _plan(self, rows: int) -> _Plan:
        plan = self._plans.get(rows)
        if plan is None:
            plan = self._plans[rows] = self._make_plan(rows)
        return plan

    def _make_plan(self, rows: int) -> _Plan:
        layout = segment_layout(self.spec, rows)
        fields = self.fields(self.spec.columns)
        counts = [rows - (column.per == "step") for column in self.spec.columns]
        columns = np.column_stack((layout.offsets, fields, counts)).astype(np.int64)
        checked = [
            layout.places[name].offset if name in layout.places else 0 for name in slot_kernels.CHECKED
        ]
        return _Plan(layout, columns, np.array([*checked, rows - 1, self._actions], np.int64))

    def fields(self, columns: Sequence[Column]) -> Ints:
        """Where these columns lie in a row: [columns, (offset, bytes)]."""
        offsets = {name: field[1] for name, field in (row_dtype(self.spec).fields or {}).items()}
        return np.array([(offsets[column.name], column.row_bytes) for column in columns], np.int64)

    def valid_slots(self) -> Ints:
        return np.flatnonzero(self.commit)

    def stored_twice(self) -> int:
        """Steps in valid slots whose segment lies in another slot too, the first copy not counted."""
        records = self.metadata[self.valid_slots()]
        keys = np.column_stack((records["incarnation"], records["sequence"]))
        _distinct, first = np.unique(keys, axis=0, return_index=True)
        return int(records["owned"].sum()) - int(records["owned"][first].sum())

    def sync(self) -> None:
        """Puts everything on the disk, commits after what they commit; from any thread."""
        for name in ("rows", "metadata", "priorities", "commit", "state"):
            sync_file(self.directory / name)


def _check_layout(path: Path, spec: AgentSpec, slots: int, segment_steps: int, n_step: int) -> None:
    wanted = {
        "format": 4,
        "spec": spec.model_dump(mode="json"),
        "slots": slots,
        "segment_steps": segment_steps,
        "n_step": n_step,
    }
    if empty := [column.name for column in spec.columns if column.row_items == 0]:
        raise ConfigError(f"{empty[0]} has a shape without any values; nothing of it could be stored")
    if not path.exists():
        _write_layout(path, json.dumps(wanted, indent=1))
        return
    found = _read_layout(path)
    differences = [
        f"{key} is {found.get(key)} there and {value} here"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if differences:
        raise ConfigError(
            f"the replay files in {path.parent} were made for another config: {'; '.join(differences)}. "
            "Set it back, or start a new run directory"
        )


def _read_layout(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} is damaged, so the files beside it cannot be read; start a new run directory"
        )
    return found


def _write_layout(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    sync_file(draft)
    draft.replace(path)
    sync_file(path.parent)
