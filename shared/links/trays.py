"""Batches through memory that both ends have: for a learner and a replay service on one machine.

The learner lends replay a tray with its request: a memfd of its own, which replay finds through /proc, checks
and maps. The batch is assembled on it, and only the answer's header travels. A tray is lent with the first
sending of a request alone, never with its repeats, and comes back only with the answer that says it was used;
any other end (a refusal, a deadline, a batch that came through the socket) leaves it behind for good, since
somebody who was asleep may still write on it. So nothing is written to memory that is being read. Where
replay cannot reach the learner's memory (another machine or container, another system than Linux), it says so
and batches travel as they always did. A tray has no name in any file system: it ends with its last user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
import uuid
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from shared.errors import BadMessage, NoTray
from shared.layout import Arrays, Block, Packed, parse_layout
from shared.logs import get_logger
from shared.messages import Tray

log = get_logger()

SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
MAPPED_TRAYS = 64  # of one agent, each with a descriptor; its learner has a few more than requests in flight


@dataclass(slots=True)
class LentTray:
    """A tray at its learner."""

    tray: Tray
    descriptor: int
    block: Block  # views on it hold it: who counts its references knows whether it is still being read

    @property
    def held(self) -> bool:
        return sys.getrefcount(self.block) > _UNHELD


class TrayLender:
    """The learner's end: makes trays, lends those that nobody reads, takes them back with a batch."""

    def __init__(self, most: int, *, enabled: bool = True) -> None:
        self.batches = 0  # that came on a tray
        self._enabled = enabled and SUPPORTED
        self._most = most
        self._size = 0  # bytes that the largest batch so far had: the first ones come through the socket
        self._idle: list[LentTray] = []  # with us; some of them may still be read
        self._lent = 0

    def lend(self) -> LentTray | None:
        """A tray for the next request; None: it must do without."""
        if not self._enabled or not self._size:
            return None
        for place, lent in enumerate(self._idle):
            if not lent.held:
                self._lent += 1
                return self._idle.pop(place)
        if len(self._idle) + self._lent >= self._most:
            return None
        self._lent += 1
        return _make_tray(self._size)

    def take_back(self, lent: LentTray, arrays: str) -> Packed:
        """The batch that replay has put on it, described as the `arrays` of a header."""
        try:
            layout = parse_layout(arrays)
            if layout.nbytes > lent.block.nbytes:
                raise BadMessage(f"a batch of {layout.nbytes} bytes on a tray of {lent.block.nbytes}")
        except BadMessage:
            self.leave(lent)
            raise
        self._lent -= 1
        self.batches += 1
        packed = Packed(layout, lent.block[: layout.nbytes])
        self._idle.append(lent)
        return packed

    def leave(self, lent: LentTray) -> None:
        """Its request ended in another way: whoever has the tray may keep it, we do not look at it again."""
        self._lent -= 1
        os.close(lent.descriptor)

    def note_size(self, arrays: Arrays) -> None:
        """This batch came through the socket: trays must hold as much."""
        if isinstance(arrays, Packed) and arrays.layout.nbytes > self._size:
            self._size = arrays.layout.nbytes
            for lent in self._idle:
                os.close(lent.descriptor)
            self._idle.clear()

    def give_up(self, reason: str) -> None:
        """Replay cannot use our trays, so we lend no more."""
        if self._enabled:
            self._enabled = False
            log.info("batches come through the socket", reason=reason)

    def close(self) -> None:
        self._enabled = False
        for lent in self._idle:
            os.close(lent.descriptor)
        self._idle.clear()


def _make_tray(size: int) -> LentTray:
    name = uuid.uuid4().hex
    descriptor = os.memfd_create(_file_name(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, size)
    # Who maps it need not fear that it shrinks under them, which would end their process at the next write.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    block = np.frombuffer(_mapped(descriptor, size), np.uint8)
    return LentTray(Tray(pid=os.getpid(), descriptor=descriptor, name=name), descriptor, block)


def _file_name(name: str) -> str:
    return f"rookery-{name}"


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _references_when_unheld() -> int:
    """What `getrefcount` says, asked as in `held`, of a block that only its tray holds."""
    lent = LentTray(Tray(pid=0, descriptor=0, name="0" * 32), 0, np.empty(1, np.uint8))
    return sys.getrefcount(lent.block)


_UNHELD = _references_when_unheld()


class TrayTable:
    """Replay's end: the trays of one agent's learner, mapped once and kept while they are used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mapped: OrderedDict[str, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mapped)

    def open(self, tray: Tray) -> Block:
        """Its memory, or NoTray with the reason."""
        block = self._mapped.get(tray.name)
        if block is not None:
            self._mapped.move_to_end(tray.name)
            return block
        block = self._mapped[tray.name] = _open_tray(tray, self._max_bytes)
        if len(self._mapped) > MAPPED_TRAYS:
            self._mapped.popitem(last=False)
        return block

    def clear(self) -> None:
        """The learner is gone, and its memory shall not stay because of us."""
        self._mapped.clear()


def _open_tray(tray: Tray, max_bytes: int) -> Block:
    path = f"/proc/{tray.pid}/fd/{tray.descriptor}"
    expected = f"/memfd:{_file_name(tray.name)} (deleted)"
    if not SUPPORTED:
        raise NoTray("shared memory of this kind needs Linux")
    try:
        # Looked at before it is opened: in another container this number may be anything at all.
        _check_name(os.readlink(path), expected)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        raise NoTray(f"the learner's memory cannot be reached from here ({error.strerror})") from None
    try:
        _check_name(os.readlink(f"/proc/self/fd/{descriptor}"), expected)
        return np.frombuffer(_mapped(descriptor, _checked_size(descriptor, max_bytes)), np.uint8)
    except (OSError, ValueError) as error:
        raise NoTray(f"the learner's memory cannot be mapped ({error})") from None
    finally:
        os.close(descriptor)


def _check_name(found: str, expected: str) -> None:
    if found != expected:
        raise NoTray("the learner's memory cannot be reached from here (something else has its number)")


def _checked_size(descriptor: int, max_bytes: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NoTray("a tray that is not a file")
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals != seals:
        raise NoTray("a tray that may shrink while it is written to")
    if not 0 < status.st_size <= max_bytes:
        raise NoTray(f"a tray of {status.st_size:,} bytes; the limit is {max_bytes:,}")
    return status.st_size
