"""Who may connect to the sockets of this process: ZAP, libzmq's protocol for asking just that.

libzmq asks in a message of its own before it lets a peer's first message through, in either direction. A key
that is not known is looked up once more in the members' file: it may have been added a moment ago.
"""

from __future__ import annotations

from typing import Any

import zmq
import zmq.utils.z85

from shared.errors import ConfigError
from shared.keys import Keys
from shared.logs import get_logger
from shared.loop import Loop

log = get_logger()

ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks
VERSION = b"1.0"
REQUEST_FRAMES = 8  # empty, version, number, domain, address, identity, mechanism, key


class Doorkeeper:
    """Answers for all bound sockets of one context, in the loop of their thread."""

    def __init__(self, context: zmq.Context[Any], loop: Loop, keys: Keys) -> None:
        self._keys = keys
        self._members = keys.members()
        self._loop = loop
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ADDRESS)
        loop.on_readable(self._socket, self.receive)

    def receive(self) -> None:
        while self._socket.poll(0):
            asker, *request = self._socket.recv_multipart()
            self._socket.send_multipart([asker, *self._answer(request)])

    def close(self) -> None:
        self._loop.forget(self._socket)
        self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[2] if len(request) > 2 else b""
        name = self._name_of(request)
        if name is None:
            return [b"", VERSION, number, b"400", b"not a member of this run", b"", b""]
        return [b"", VERSION, number, b"200", b"", name.encode(), b""]

    def _name_of(self, request: list[bytes]) -> str | None:
        if len(request) != REQUEST_FRAMES or request[1] != VERSION or request[6] != b"CURVE":
            return None
        key = zmq.utils.z85.encode(request[7])
        if key not in self._members:
            self._look_again()
        name = self._members.get(key)
        if name is None:
            log.warning("unknown key", address=request[4].decode(errors="replace"), key=key.decode())
        return name

    def _look_again(self) -> None:
        try:
            self._members = self._keys.members()
        except ConfigError as error:
            log.warning(
                "the members' file cannot be read; those known before may still come", reason=str(error)
            )
