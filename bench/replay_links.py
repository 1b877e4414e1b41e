"""What libzmq itself can do with messages of the same size: the floor under the service's figures.

Each is a process of its own with the barest loop that works: no headers, no checks, nothing is done with the
bytes. All processes of a comparison are scheduled alike, as services are (`shared/scheduling.py`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import zmq

from shared.scheduling import interrupt_nobody

SPAWN = multiprocessing.get_context("spawn")
REQUEST_BYTES = 150


def serve_echo(endpoint: str, reply_bytes: int) -> None:
    """A ROUTER that answers everything with the same bytes, sent without a copy."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    reply = bytes(reply_bytes)
    while True:
        peer, _request = socket.recv_multipart(copy=False)
        socket.send_multipart([peer, reply], copy=False)


class EchoClient:
    """A DEALER with some requests in flight."""

    def __init__(self, endpoint: str, in_flight: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._in_flight = in_flight

    def run(self, seconds: float) -> float:
        """Answers/s over this time; nothing is in flight before and after."""
        request = b"x" * REQUEST_BYTES
        for _ in range(self._in_flight):
            self._socket.send(request)
        answers, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            self._socket.recv(copy=False)
            self._socket.send(request)
            answers += 1
        for _ in range(self._in_flight):
            self._socket.recv(copy=False)
        return answers / elapsed


def push_forever(endpoint: str, message_bytes: int, going: Any) -> None:
    """A PUSH that sends while `going` is set."""
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(64)
    socket.connect(endpoint)
    message = bytes(message_bytes)
    while True:
        going.wait()
        socket.send(message, copy=False)


def pull_forever(endpoint: str, counted: Any) -> None:
    """A PULL that counts."""
    socket = zmq.Context().socket(zmq.PULL)
    socket.set_hwm(1000)
    socket.bind(endpoint)
    while True:
        socket.recv(copy=False)
        counted.value += 1


class Driven:
    """Something that measures for a while when it is told to, in a process of its own."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self.process = start(_measure_when_told, theirs, make, arguments)
        theirs.close()  # so that its end is heard of, should it end
        self._pipe.recv()

    def run(self, seconds: float) -> float:
        self._pipe.send(seconds)
        return float(self._pipe.recv())


def _measure_when_told(pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    measuring = make(*arguments)
    pipe.send("ready")
    while True:
        pipe.send(measuring.run(pipe.recv()))


def start(target: Callable[..., None], *arguments: Any) -> Any:
    process = SPAWN.Process(target=_run_as_services_do, args=(target, *arguments), daemon=True)
    process.start()
    return process


def _run_as_services_do(target: Callable[..., None], *arguments: Any) -> None:
    interrupt_nobody()
    target(*arguments)


def end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
