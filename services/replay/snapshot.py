"""Takes snapshots of buffers while they are being filled and drawn from.

A snapshot is the state at the moment it began, exactly. Then, in the service's own thread, only the commit
words, the stream table and the state record are copied. Everything else is copied slot by slot between turns,
for at most `SLICE_S` a turn, and a slot that is about to change is copied just before (`before_insert`,
`before_update`). A thread writes the copies: a slow disk holds up nobody, it can only fail the snapshot.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.replay import snapshot_files
from services.replay.buffer import AgentBuffer
from services.replay.records import Array, Ints
from services.replay.snapshot_files import Manifest
from shared.errors import Refused

SLICE_S = 0.001  # of a turn
CHUNK_BYTES = 512 * 2**10  # of rows, copied at once; one slot at least
CHUNK_SLOTS = 2_048  # of metadata and priorities
WAITING_BYTES = 16 * 2**20  # copied and not yet written, before the copying waits for the disk
MOST_WAITING_BYTES = 512 * 2**20  # with what inserts forced to be copied
# Written between two calls to the disk: a pile of dirty pages stalls all mapped files.
SYNC_BYTES = 32 * 2**20

_ATTEMPTS = itertools.count()


class RowFile:
    """The snapshot's `rows`, written by a thread at any place in any order."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._unsynced = 0

    def write(self, data: memoryview, offset: int) -> None:
        self._unsynced += len(data)
        while len(data):
            written = os.pwrite(self._handle, data, offset)
            data, offset = data[written:], offset + written
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._handle)
            self._unsynced = 0

    def close(self) -> None:
        os.close(self._handle)


class BufferCopy:
    """One buffer's state at the moment this was made, copied little by little."""

    def __init__(self, buffer: AgentBuffer, emit: Callable[[Array, int], None]) -> None:
        self._ring, self._emit = buffer.ring, emit
        ring = self._ring
        self.steps = buffer.drawable_steps
        self.slot_bytes = ring.slot_rows * ring.packed.shape[1]
        self.commit = ring.commit.copy()
        self.streams, self.state = buffer.stream_bytes(), ring.state.as_bytes()
        self.metadata, self.priorities = np.empty_like(ring.metadata), np.empty_like(ring.priority_records)
        self._records = [
            (_bytes_of(self.metadata), _bytes_of(ring.metadata)),
            (_bytes_of(self.priorities), _bytes_of(ring.priority_records)),
        ]
        self._rows = ring.packed.reshape(ring.slots, self.slot_bytes)
        self._valid = np.flatnonzero(self.commit)
        self._place = np.full(ring.slots, -1, np.int64)  # a slot's place among the valid ones
        self._place[self._valid] = np.arange(len(self._valid))
        self._record_missing = np.ones(ring.slots, bool)
        self._row_missing = np.ones(len(self._valid), bool)  # by place
        self._record_cursor = self._row_cursor = 0
        ring.watcher = self

    @property
    def done(self) -> bool:
        return self._record_cursor >= self._ring.slots and self._row_cursor >= len(self._valid)

    def end(self) -> None:
        """The buffer's changes are no longer of interest."""
        self._ring.watcher = None

    # --- called by the buffer -----------------------------------------------------------------------------

    def before_insert(self, slot: int) -> None:
        """This slot is about to be overwritten."""
        if self._record_missing[slot]:
            self._copy_records(np.array([slot]))
        place = self._place[slot]
        if place >= 0 and self._row_missing[place]:
            self._copy_rows(int(place), 1)

    def before_update(self, slots: Ints) -> None:
        """Priorities of these slots are about to change; numbers out of range are the buffer's to refuse."""
        known = slots[(slots >= 0) & (slots < self._ring.slots)]
        missing = known[self._record_missing[known]]
        if len(missing):
            self._copy_records(np.unique(missing))

    # --- called between turns -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Copies one more chunk: first what drawing changes, then rows, which only inserts change."""
        if self._record_cursor < self._ring.slots:
            start, self._record_cursor = self._record_cursor, self._record_cursor + CHUNK_SLOTS
            self._copy_records(start + np.flatnonzero(self._record_missing[start : self._record_cursor]))
            return
        count = max(1, CHUNK_BYTES // self.slot_bytes)
        start, self._row_cursor = self._row_cursor, self._row_cursor + count
        missing = start + np.flatnonzero(self._row_missing[start : self._row_cursor])
        for first, length in snapshot_files.runs(missing):
            self._copy_rows(first, length)

    def _copy_records(self, slots: Ints) -> None:
        for kept, present in self._records:
            kept[slots] = present[slots]
        self._record_missing[slots] = False

    def _copy_rows(self, place: int, count: int) -> None:
        self._row_missing[place : place + count] = False
        self._emit(self._rows[self._valid[place : place + count]], place * self.slot_bytes)

    # --- called by the writing thread, when everything is copied ------------------------------------------

    def write_rest(self, directory: Path, layout: Path) -> None:
        """Every file but the rows."""
        shutil.copyfile(layout, directory / "layout.json")
        for name in ("metadata", "priorities", "commit"):
            (directory / name).write_bytes(getattr(self, name).data)
        (directory / "streams").write_bytes(self.streams)
        (directory / "state").write_bytes(self.state)


class Snapshot:
    """One snapshot of some buffers, all as they are now, on its way to the disk."""

    def __init__(
        self,
        replay: Path,
        service: int,
        number: int,
        buffers: Mapping[str, AgentBuffer],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_written` is called from another thread whenever `advance` may have something to do again."""
        self.number, self.agents = number, list(buffers)
        self.started = time.monotonic()
        self.longest_slice_s = 0.0
        self.manifests: dict[str, Manifest] = {}
        self._root = snapshot_files.root_of(replay)
        self._draft = snapshot_files.draft_path(self._root, number, service, next(_ATTEMPTS))
        self._on_written = on_written
        self._writer = ThreadPoolExecutor(1, "snapshot")
        self._waiting: deque[tuple[Future[Any], int]] = deque()  # what the thread has to do, with its bytes
        self._copied: list[tuple[str, Array, int]] = []  # since the thread was last given something
        self._waiting_bytes = 0
        self._sealed = False
        self._files: dict[str, RowFile] = {}
        self._copies: dict[str, BufferCopy] = {}
        self._submit(0, self._make_draft)
        for agent, buffer in buffers.items():
            self._copies[agent] = BufferCopy(buffer, self._emitter(agent))
        self._directories = {agent: buffer.ring.directory for agent, buffer in buffers.items()}
        self.longest_slice_s = time.monotonic() - self.started

    def advance(self) -> bool:
        """Copies for a moment; True when there is more to copy at once. Raises Refused when it failed."""
        started = time.monotonic()
        self._check_written()
        while (copy := self._unfinished()) and self._waiting_bytes < WAITING_BYTES:
            copy.advance()
            if time.monotonic() - started >= SLICE_S:
                break
        self._hand_over()
        if self._unfinished() is None and not self._sealed:
            self._seal()
        self.longest_slice_s = max(self.longest_slice_s, time.monotonic() - started)
        return self._unfinished() is not None and self._waiting_bytes < WAITING_BYTES

    @property
    def done(self) -> bool:
        """Everything is on the disk under its name."""
        return self._sealed and not self._waiting

    def abandon(self) -> None:
        """Ends it unfinished and removes what was written."""
        self._end_copies()
        for future, _size in self._waiting:
            future.cancel()
        self._writer.submit(self._remove_draft)
        self._writer.shutdown(wait=False)

    def finish(self, timeout_s: float | None = None) -> None:
        """Copies and writes without turns in between; for tests and for those who have no loop."""
        while not self.done:
            if not self.advance() and self._waiting:
                self._waiting[0][0].exception(timeout_s)

    # --- in the service's thread --------------------------------------------------------------------------

    def _unfinished(self) -> BufferCopy | None:
        return next((copy for copy in self._copies.values() if not copy.done), None)

    def _emitter(self, agent: str) -> Callable[[Array, int], None]:
        def emit(rows: Array, offset: int) -> None:
            self._copied.append((agent, rows, offset))
            self._waiting_bytes += rows.nbytes

        return emit

    def _hand_over(self) -> None:
        """Once a turn: each thing that the thread is given makes it take the interpreter's lock from us."""
        copied, self._copied = self._copied, []
        if copied:
            self._submit(sum(rows.nbytes for _agent, rows, _offset in copied), lambda: self._write(copied))

    def _submit(self, size: int, work: Callable[[], None]) -> None:
        future = self._writer.submit(work)
        future.add_done_callback(lambda _future: self._on_written())
        self._waiting.append((future, size))

    def _check_written(self) -> None:
        while self._waiting and self._waiting[0][0].done():
            future, size = self._waiting.popleft()
            self._waiting_bytes -= size
            error = future.exception()
            if isinstance(error, OSError):
                reason = f"snapshot {self.number} cannot be written: {error.strerror or error}"
                raise Refused("storage_failed", reason)
            if error is not None:
                raise error
        if self.done:
            self._writer.shutdown(wait=False)
        if self._waiting_bytes > MOST_WAITING_BYTES:
            reason = f"snapshot {self.number}: {self._waiting_bytes:,} bytes wait for a disk that is too slow"
            raise Refused("storage_failed", reason)

    def _seal(self) -> None:
        self._sealed = True
        self._end_copies()
        for agent in self.agents:
            self._submit(0, lambda agent=agent: self._seal_agent(agent))  # type: ignore[misc]
        self._submit(0, self._publish)

    def _end_copies(self) -> None:
        for copy in self._copies.values():
            copy.end()

    # --- in the writing thread ----------------------------------------------------------------------------

    def _make_draft(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)
        for agent in self.agents:
            (self._draft / agent).mkdir(parents=True)
            self._files[agent] = RowFile(self._draft / agent / "rows")

    def _write(self, copied: list[tuple[str, Array, int]]) -> None:
        for agent, rows, offset in copied:
            self._files[agent].write(rows.reshape(-1).data, offset)

    def _seal_agent(self, agent: str) -> None:
        copy, directory = self._copies[agent], self._draft / agent
        self._files.pop(agent).close()
        copy.write_rest(directory, self._directories[agent] / "layout.json")
        self.manifests[agent] = snapshot_files.seal(
            directory,
            self.number,
            agent,
            steps=copy.steps,
            slots=len(copy.commit),
            slot_bytes=copy.slot_bytes,
        )

    def _publish(self) -> None:
        snapshot_files.publish(self._root, self._draft, self.number)
        snapshot_files.prune(self._root, self.agents)

    def _remove_draft(self) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._draft, ignore_errors=True)


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """The records as rows of bytes: copied as such they are several times faster."""
    return array.view(np.uint8).reshape(len(array), array.dtype.itemsize)
