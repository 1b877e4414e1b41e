"""Where a service says how it is: a unix socket that answers every connection with one line of JSON.

The answer comes from the service's own loop, so a service that hangs does not answer.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.loop import Loop


@dataclass(frozen=True, slots=True)
class Health:
    """How a service is, for a program and for people."""

    ready: bool
    words: str


class HealthSocket:
    """Answers for as long as the loop turns."""

    def __init__(self, loop: Loop, path: str, health: Callable[[], Health]) -> None:
        self._loop, self._path, self._health = loop, path, health
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            Path(path).unlink(missing_ok=True)  # a killed service leaves it behind
            self._socket.bind(path)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"run.health_socket = {path}: {error.strerror or error}") from None
        self._socket.listen()
        loop.on_readable(self._socket.fileno(), self.answer)

    def answer(self) -> None:
        try:
            connection, _address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it did not wait
        with connection:
            said = json.dumps(asdict(self._health())).encode() + b"\n"
            connection.setblocking(False)
            try:
                connection.send(said)
            except OSError:
                return  # gone before the answer

    def close(self) -> None:
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)


def open_health_socket(loop: Loop, path: str, health: Callable[[], Health]) -> HealthSocket | None:
    """None: nobody asks here."""
    return HealthSocket(loop, path, health) if path else None
