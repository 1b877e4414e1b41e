"""Experience on its way: PUSH (SegmentSender, one for each replay service) to PULL (SegmentReceiver).

When replay is gone or slow the sender's queue fills and `send` says no: the actor keeps the segment in its
window and waits, visibly. IMMEDIATE keeps segments out of half-open connections. What was queued when a
replay died may be lost or overtaken by later segments; the streams' sequence numbers make that harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import zmq

from shared.errors import BadMessage
from shared.layout import Block
from shared.links.network import ConnectionWatch, Network
from shared.logs import get_logger
from shared.segment_frame import SegmentFrame, SegmentHead, read_frame

log = get_logger()

RECEIVE_QUEUE = 1_000
SEGMENTS_A_TURN = 64
COPIED_BYTES = 64 * 1024  # up to here a copy costs less than telling when libzmq needs the original no more

OnSegment = Callable[[SegmentHead, Block], None]


class SegmentSender:
    """The actor's end."""

    def __init__(self, network: Network, endpoint: str, *, queue: int) -> None:
        self._loop = network.loop
        self._socket = network.socket(zmq.PUSH, queue=queue)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        network.connect(self._socket, endpoint)

    def send(self, segment: SegmentFrame) -> bool:
        """Queues a segment. False: the queue is full or nobody is there; the loop wakes when that changes."""
        data = segment.data
        try:
            self._socket.send(data, zmq.NOBLOCK, copy=len(data) <= COPIED_BYTES)
        except zmq.Again:
            self._loop.wake_when_writable(self._socket)
            return False
        return True

    def close(self) -> None:
        self._loop.forget(self._socket)
        self._socket.close()


class SegmentReceiver:
    """Replay's end. There is nobody to answer here: what is bad is counted, logged and dropped."""

    def __init__(self, network: Network, endpoint: str, on_segment: OnSegment, *, run: str) -> None:
        self.counters: Counter[str] = Counter()
        self.pressed = False  # more had come than it takes in a turn; for whoever wants to know to set back
        self._on_segment = on_segment
        self._run = run
        self._loop = network.loop
        self._socket = network.socket(zmq.PULL, queue=RECEIVE_QUEUE)
        network.bind(self._socket, endpoint)
        self._watch = ConnectionWatch(self._socket, "segments", self.counters)
        self._news = self._loop.on_readable(self._socket, self.receive, told=True)
        self._loop.on_readable(self._watch.socket, self._watch.receive, told=True)

    def receive(self) -> None:
        """Takes what has arrived, up to a bound, so that samples are served in between."""
        for _ in range(SEGMENTS_A_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._news.emptied()
                return
            try:
                self._take(frame)
            except BadMessage as error:
                self.counters["bad_segments"] += 1
                log.warning("bad segment dropped", reason=str(error))
        self.pressed = True

    def close(self) -> None:
        self._loop.forget(self._watch.socket)
        self._loop.forget(self._socket)
        self._watch.close()
        self._socket.close()

    def _take(self, frame: zmq.Frame) -> None:
        if frame.more:
            self._drop_rest()
        segment, block = read_frame(frame)
        if segment.run != self._run:
            raise BadMessage(f"a segment of run {segment.run!r}; this is run {self._run!r}")
        self._on_segment(segment, block)

    def _drop_rest(self) -> None:
        """A message of several frames is no segment: its rest must not be taken for one."""
        rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        raise BadMessage(f"a message of {1 + len(rest)} frames; a segment is one")
