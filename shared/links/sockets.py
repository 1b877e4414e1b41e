"""How every socket of Rookery is made: bounded queues and messages, no lingering, and a watch on bound ones.

libzmq drops a connection that sends a frame over MAXMSGSIZE or bytes that are not its protocol, and says
nothing about it. `ConnectionWatch` listens to the socket's monitor, so that both are counted and logged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.logs import get_logger

log = get_logger()

_WATCHED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED


def make_socket(
    context: zmq.Context[Any], kind: int, *, queue: int, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """A socket with bounds. A restarted peer is found again quickly; a closed socket drops its queue."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(queue)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    # A peer that vanished without closing (a cut cable, a paused container) is noticed and reconnected to.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket


class ConnectionWatch:
    """Counts what libzmq refuses silently on a bound socket."""

    def __init__(self, socket: zmq.Socket[bytes], name: str, counters: Counter[str]) -> None:
        self._watched = socket
        self.socket = socket.get_monitor_socket(_WATCHED)
        self._name = name
        self._counters = counters

    def receive(self) -> None:
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._counters["disconnects"] += 1  # also what a frame over the limit looks like
                log.info("connection closed", link=self._name)
            else:
                self._counters["bad_handshakes"] += 1
                log.warning("connection refused: not our protocol", link=self._name, code=event["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)
