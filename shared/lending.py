"""Owns memory that libzmq sends from where it lies, and knows when libzmq has let go of it.

pyzmq can send without a copy too, but learns of each message's end through a thread of its own that needs the
interpreter's lock: 8 to 15 us for each, and it gets in the way of the thread that works. Here libzmq's own
thread calls a compiled function that clears a word (`Release`, which must never need that lock); whoever
wants to use the memory again looks at the word.

libzmq is called through pyzmq's own handle on it, so that there is never a second one in the process. Where
that does not work (pyzmq was built in another way) there are no loans, and blocks are sent as pyzmq does it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

Release = int  # address of a C function (void *data, void *word) that sets the 64 bits at `word` to 0

_MESSAGE_WORDS = 8  # zmq_msg_t is 64 bytes
_BACKEND = "zmq.backend.cython._zmq"


class _Libzmq:
    """The calls that pyzmq does not offer. They never wait, so they keep the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path, use_errno=True)  # it is loaded already: this finds it, and what it uses
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.init_data = library.zmq_msg_init_data
        self.init_data.argtypes, self.init_data.restype = [pointer, pointer, size, pointer, pointer], integer
        self.send = library.zmq_msg_send
        self.send.argtypes, self.send.restype = [pointer, pointer, integer], integer
        self.close = library.zmq_msg_close
        self.close.argtypes, self.close.restype = [pointer], integer
        self._version = library.zmq_version
        self._version.argtypes, self._version.restype = [pointer] * 3, None

    @property
    def version(self) -> tuple[int, ...]:
        parts = (ctypes.c_int * 3)()
        size = ctypes.sizeof(ctypes.c_int)
        self._version(*(ctypes.addressof(parts) + place * size for place in range(3)))
        return tuple(parts)


def _find_libzmq() -> _Libzmq | None:
    """That of pyzmq, or None where its symbols cannot be reached."""
    try:
        found = _Libzmq(importlib.import_module(_BACKEND).__file__ or "")
    except (ImportError, OSError, AttributeError):
        return None
    return found if found.version == zmq.zmq_version_info() else None


_LIBZMQ = _find_libzmq()


class Loan:
    """A block that can be sent, once at a time. It holds the block: so does what libzmq still has of it."""

    __slots__ = ("_address", "_message", "_message_address", "_out", "_out_address", "_release", "block")

    def __init__(self, block: npt.NDArray[np.uint8], release: Release) -> None:
        self.block = block
        self._release = release
        self._address = block.ctypes.data
        self._message = (ctypes.c_uint64 * _MESSAGE_WORDS)()
        self._message_address = ctypes.addressof(self._message)
        self._out = ctypes.c_uint64(0)
        self._out_address = ctypes.addressof(self._out)

    @property
    def out(self) -> bool:
        """Whether libzmq may still read the block."""
        return self._out.value != 0

    def send(self, socket: zmq.Socket[bytes], flags: int) -> None:
        """As one frame. What cannot be queued is released at once."""
        if _LIBZMQ is None or self._out.value:  # the same block once more: pyzmq keeps count of those
            socket.send(self.block.data, flags, False)
            return
        _OUT.add(self)
        self._out.value = 1
        message = self._message_address
        _LIBZMQ.init_data(message, self._address, self.block.nbytes, self._release, self._out_address)
        if _LIBZMQ.send(message, socket.underlying, flags) < 0:
            number = ctypes.get_errno()
            _LIBZMQ.close(message)
            raise zmq.Again if number == zmq.EAGAIN else zmq.ZMQError(number, os.strerror(number))


# What libzmq may still read must stay where it is whatever becomes of its owner, even when the interpreter
# ends before libzmq's threads do: so this set itself is never freed.
_OUT: set[Loan] = set()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_OUT))


def lend(block: npt.NDArray[np.uint8], release: Release) -> Loan | None:
    """For a block that will be sent again and again; None where libzmq cannot be reached."""
    for loan in [loan for loan in _OUT if not loan.out]:
        _OUT.discard(loan)  # its owner has it; if there is none any more it ends here
    return None if _LIBZMQ is None else Loan(block, release)


def never_free(anything: Any) -> None:
    """For what libzmq's threads may use until the process ends, the function that releases above all."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(anything))
