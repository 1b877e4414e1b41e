"""Steps to segments: cuts each environment slot's episode into segments with the context they need.

For each slot a small rolling buffer keeps the rows that the next segment will need: the last stack - 1
observations before it, its own steps, and the n steps after it. A segment closes after `segment_steps` steps
and at the end of an episode; it leaves once the n later rows exist or the episode has ended. Its rows are
copied once, into the frame in which they travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.codec import segment_checksum, segment_layout
from shared.layout import Array, Arrays, Layout, Packed
from shared.segment_frame import SegmentFrame, SegmentHead, empty_frame, write_head
from shared.specs import AgentSpec

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cut:
    """A finished segment of one slot, before it gets its place in a stream."""

    slot: int
    epoch: int
    before: int
    owned: int
    rows: int
    arrays: Packed
    frame: memoryview  # in which the arrays lie, with room for a header before them


class SegmentWriter:
    """One agent's rows in all slots of an actor."""

    def __init__(self, spec: AgentSpec, envs: int, segment_steps: int, n_step: int) -> None:
        self.spec = spec
        self._segment_steps, self._n_step = segment_steps, n_step
        # stack - 1 rows of context, the owned steps, n - 1 later steps, and the newest observation
        self._capacity = spec.stack - 1 + segment_steps + n_step
        self._columns = {
            column.name: np.zeros((envs, self._capacity, *column.shape), column.dtype.numpy)
            for column in spec.columns
        }
        self._steps = np.zeros(envs, np.int64)  # rows that hold a step
        self._first = np.zeros(envs, np.int64)  # the first row that is owned by no segment yet
        self._epoch = np.zeros(envs, np.int64)
        self._all = np.arange(envs)
        self._layouts: dict[int, Layout] = {}  # of segments, by their rows

    @property
    def open_steps(self) -> int:
        """Steps that were played and are in no segment yet."""
        return int((self._steps - self._first).sum())

    def begin(self, slots: Mask, epoch: npt.NDArray[np.int64]) -> None:
        """New episodes in these slots; what they held must have been cut."""
        self._steps[slots] = 0
        self._first[slots] = 0
        self._epoch[slots] = epoch[slots]

    def add(self, slots: Mask, rows: Arrays) -> None:
        """Records one step (observation, action, reward, ...) in each of these slots."""
        chosen = self._all if slots.all() else np.flatnonzero(slots)
        at = self._steps[chosen]
        for name, values in rows.items():
            self._columns[name][chosen, at] = values[chosen]
        self._steps[chosen] += 1

    def cut(self, ended: Mask, newest: Array) -> Iterator[Cut]:
        """The segments that can leave now. `newest` is the observation [envs, ...] after the last step."""
        pending = self._steps - self._first
        due = (pending >= self._segment_steps + self._n_step - 1) | (ended & (pending > 0))
        for slot in np.flatnonzero(due):
            self._columns["observation"][slot, self._steps[slot]] = newest[slot]
            yield from self._cut_slot(int(slot), bool(ended[slot]))

    def _cut_slot(self, slot: int, ended: bool) -> Iterator[Cut]:
        while True:
            pending = int(self._steps[slot] - self._first[slot])
            complete = pending >= self._segment_steps + self._n_step - 1
            if not complete and not (ended and pending > 0):
                break
            yield self._take(slot, min(pending, self._segment_steps))
        self._shift(slot)

    def _take(self, slot: int, owned: int) -> Cut:
        first, steps = int(self._first[slot]), int(self._steps[slot])
        start = max(0, first - (self.spec.stack - 1))
        last = min(first + owned - 1 + self._n_step, steps)  # the row of the last observation needed
        rows = last + 1 - start
        arrays, frame = empty_frame(self._layout_of(rows))
        for name, values in self._columns.items():
            part = arrays[name]
            part[...] = values[slot, start : start + len(part)]
        self._first[slot] += owned
        return Cut(slot, int(self._epoch[slot]), first - start, owned, rows, arrays, frame)

    def _layout_of(self, rows: int) -> Layout:
        layout = self._layouts.get(rows)
        if layout is None:
            layout = self._layouts[rows] = segment_layout(self.spec, rows)
        return layout

    def _shift(self, slot: int) -> None:
        """Moves the rows that are still needed to the front."""
        start = max(0, int(self._first[slot]) - (self.spec.stack - 1))
        if start == 0:
            return
        kept = int(self._steps[slot]) - start
        for values in self._columns.values():
            values[slot, :kept] = values[slot, start : start + kept].copy()
        self._first[slot] -= start
        self._steps[slot] -= start


def make_segment(
    cut: Cut,
    *,
    run: str,
    incarnation: str,
    agent: str,
    sequence: int,
    produced_steps: int,
    actor_index: int,
    number: int = 0,
    closes_round: bool = False,
) -> SegmentFrame:
    """A cut with its place in a stream (and, in lockstep, in round `number`), as it travels."""
    head = SegmentHead(
        run=run,
        agent=agent,
        incarnation=incarnation,
        sequence=sequence,
        produced_steps=produced_steps,
        actor_index=actor_index,
        slot=cut.slot,
        epoch=cut.epoch,
        round=number,
        layout=cut.arrays.layout.digest,
        checksum=segment_checksum(cut.arrays),
        before=cut.before,
        owned=cut.owned,
        rows=cut.rows,
        closes_round=closes_round,
    )
    write_head(head, cut.frame)
    return SegmentFrame(head, cut.arrays, cut.frame)
