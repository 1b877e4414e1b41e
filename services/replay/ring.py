"""Owns one agent's stored rows: a ring of segment slots in memory-mapped files that outlive the process.

A slot is made invalid first, then come its rows, then its metadata, and it becomes valid with one 8-byte
store of its generation: that is the commit. After `kill -9` the operating system still has every byte;
`recover` checks each slot against its checksum and drops what does not fit. One process at a time opens it.

Next: services/learner/service.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog

from services.replay import slot_kernels
from services.replay.files import check_layout, map_array, sync_file
from services.replay.records import (
    METADATA,
    METADATA_STRUCT,
    PLACE,
    WORD_BYTES,
    Ints,
    State,
    incarnation_words,
    row_dtype,
)
from services.replay.sum_tree import SumTree
from shared.codec import segment_checksum, segment_layout
from shared.layout import Layout, Packed
from shared.segment_frame import AnySegment
from shared.specs import AgentSpec, Column

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Segments with so many rows: how they travel, where each column goes, and what is checked of it."""

    layout: Layout
    columns: Ints  # for slot_kernels.store_segment
    checked: Ints  # for slot_kernels.flaw_of


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
        check_layout(directory / "layout.json", spec, slots, segment_steps, n_step)
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
        METADATA_STRUCT.pack_into(
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
        self._start_generations(valid)

    def _start_generations(self, valid: Ints) -> None:
        # A learner may hold generations of slots that a power cut took back, so the metadata alone cannot say
        # which were given out. Each opening gets a number of its own, on the disk before the first insert;
        # it is the upper half of the generations that follow.
        highest = int(self.metadata["generation"][valid].max(initial=0)) >> 32
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
