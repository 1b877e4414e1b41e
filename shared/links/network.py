"""The sockets of one process: one context, bounds on queues and messages, and the run's keys, if it has some.

With keys every connection is encrypted and both ends prove who they are: the listening end answers nobody
whose key is not among the run's members (`Doorkeeper`), the connecting end speaks to nobody but the run's own
services. Without keys a process listens on this machine alone.

libzmq drops a connection that sends a frame over MAXMSGSIZE, bytes that are not its protocol, or a wrong key,
and says nothing about it. `ConnectionWatch` listens to a bound socket's monitor, so that all three are
counted and logged.
"""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.config import Config
from shared.errors import ConfigError
from shared.keys import Keys, read_keys
from shared.links.doorkeeper import Doorkeeper
from shared.logs import get_logger
from shared.loop import Loop

log = get_logger()

_WATCHED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
_ON_THIS_MACHINE = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")


class Network:
    """Makes this process's sockets; belongs to the thread of its loop."""

    def __init__(
        self, loop: Loop, *, max_message_bytes: int, keys: Keys | None = None, listen_on: str = ""
    ) -> None:
        self.loop = loop
        self.context: zmq.Context[Any] = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._keys = keys
        self._listen_on = listen_on
        self._doorkeeper: Doorkeeper | None = None

    @classmethod
    def of(cls, config: Config, loop: Loop) -> Network:
        keys = read_keys(Path(config.security.keys)) if config.security.keys else None
        return cls(
            loop,
            max_message_bytes=config.limits.max_message_bytes,
            keys=keys,
            listen_on=config.endpoints.listen_on,
        )

    def socket(self, kind: int, *, queue: int) -> zmq.Socket[bytes]:
        """With bounds. A restarted peer is found again quickly; a closed socket drops its queue."""
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.set_hwm(queue)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        # A peer that vanished without closing (a cut cable, a paused container) is noticed and found again.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        # The same while it connects: an address where nothing answers is given up and looked up anew.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        return socket

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.member.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.member.secret)
        socket.connect(endpoint)

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Listens; where it may not or cannot, the socket is closed."""
        address = listening_address(endpoint, self._listen_on)
        try:
            self._guard(socket, address)
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            if error.errno != errno.ENODEV:
                raise
            raise ConfigError(
                f"{address} is not an address of this machine; set endpoints.listen_on to one, "
                "or to 0.0.0.0 for all of them"
            ) from None
        except ConfigError:
            socket.close()
            raise

    def _guard(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Before it listens: only members may come, or only this machine."""
        if self._keys is not None:
            if self._doorkeeper is None:  # without one, libzmq would let every key in
                self._doorkeeper = Doorkeeper(self.context, self.loop, self._keys)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server().secret)
        elif not address.startswith(_ON_THIS_MACHINE):
            raise ConfigError(
                f"{address} can be reached from other machines, and there are no keys; make some with "
                "`rookery keys make DIR` and set security.keys to DIR"
            )

    def close(self) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self.context.destroy(linger=0)


def listening_address(endpoint: str, listen_on: str) -> str:
    """What to bind so that others find this endpoint: its own address, or its port on `listen_on`."""
    if not listen_on or not endpoint.startswith("tcp://"):
        return endpoint
    return f"tcp://{listen_on}:{endpoint.rsplit(':', 1)[1]}"


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
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._counters["bad_keys"] += 1
                log.warning("connection refused: not a member's key", link=self._name)
            else:
                self._counters["bad_handshakes"] += 1
                log.warning("connection refused: not our protocol", link=self._name, code=event["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)
