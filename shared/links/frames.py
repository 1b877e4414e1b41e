"""Messages in and out of a libzmq socket, without what pyzmq's own multipart calls cost.

Those take three times as long: they check every frame, pass through wrappers, and ask the socket after each
frame whether there is another, which a frame knows itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from shared.layout import Arrays, Packed

_EVENTS = int(zmq.EVENTS)
_NOBLOCK, _READABLE = int(zmq.NOBLOCK), int(zmq.POLLIN)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Socket = zmq.Socket[bytes]


def receive_frames(socket: Socket) -> list[zmq.Frame] | None:
    """The frames of a message that has arrived, or None."""
    try:
        frame = socket.recv(_NOBLOCK, False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:  # a message arrives as a whole: the others are there
        frame = socket.recv(_NOBLOCK, False)
        frames.append(frame)
    return frames


def more_waits(socket: Socket) -> bool:
    """Whether another message has arrived. Receiving in vain takes five times as long as asking."""
    return bool(int(socket.get(_EVENTS)) & _READABLE)


def send_frames(socket: Socket, frames: Sequence[Any], arrays: Arrays | None = None) -> None:
    """Queues a message whole or raises; what is large is sent from where it lies.

    With `arrays`, the last frame is theirs: if they are in a block that is lent to libzmq, it goes as a loan.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, False)
    if isinstance(arrays, Packed) and arrays.loan is not None:
        arrays.loan.send(socket, _NOBLOCK)
    else:
        socket.send(frames[-1], _NOBLOCK, False)
