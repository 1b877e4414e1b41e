"""The one thread of a service: waits for sockets, timers and signals, then calls named handlers.

Nothing here sleeps or polls on a schedule of its own: `turn(block=True)` waits in the operating system until
a socket is readable, a timer is due or a signal arrives.

A libzmq socket has a file descriptor that becomes readable when the socket's state may have changed, and
stays so until somebody uses the socket; whether a message waits, the socket itself has to be asked (1 us). So
before a wait every socket is asked that may have been used, and after it those whose descriptors woke it;
but not those whose owners say when they were used and when they are empty (`Source`).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import zmq

Handler = Callable[[], None]

_EVENTS = int(zmq.EVENTS)
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)  # plain numbers: flags of an enum cost a microsecond


@dataclass(slots=True)
class Timer:
    """A repeating (or, with period_s 0, single) call."""

    period_s: float
    handler: Handler
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True, eq=False)
class Source:
    """Something to wait for: a libzmq socket, or (`socket` is None) a plain file descriptor."""

    fd: int
    socket: zmq.Socket[bytes] | None
    wanted: int  # _READABLE or _WRITABLE
    handler: Handler
    told: bool  # `used` is called whenever others than the handler use the socket
    doubtful: bool = True  # used since it was last asked: its descriptor may be silent and a message there

    def used(self) -> None:
        """Somebody read or wrote outside the handler, which may take the news from the descriptor."""
        self.doubtful = True

    def emptied(self) -> None:
        """For its handler, as the last thing: the socket has just said that there is nothing more to read."""
        self.doubtful = False

    def due(self) -> bool:
        """Asks whether there is something to do now."""
        ready = self.socket is None or bool(int(self.socket.get(_EVENTS)) & self.wanted)
        # The descriptor has given its news away: should the handler not come to run, nobody else knows of it.
        self.doubtful = ready or not self.told
        return ready


class Loop:
    """Sockets, timers and signals of one process. Belongs to the thread that created it."""

    def __init__(self) -> None:
        self.stopping = False
        self.stop_reason = ""
        self._poll = select.poll()
        self._sources: dict[zmq.Socket[bytes] | int, Source] = {}
        self._by_fd: dict[int, Source] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signal_handlers: dict[int, Handler] = {}
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._previous_wakeup_fd: int | None = None
        self._previous_signals: dict[int, object] = {}
        self.on_readable(self._wake_receive.fileno(), self._on_wakeup)

    def on_readable(self, source: zmq.Socket[bytes] | int, handler: Handler, *, told: bool = False) -> Source:
        """Calls `handler` whenever the socket (or file descriptor) has something to read.

        `told` promises two things, and saves most of the asking: whoever reads or sends outside this handler
        calls `used` on what this returns, and the handler does not mind when there is nothing to read.
        """
        return self._register(source, _READABLE, handler, told=told)

    def forget(self, source: zmq.Socket[bytes] | int) -> None:
        known = self._sources.pop(source, None)
        if known is not None:
            del self._by_fd[known.fd]
            self._poll.unregister(known.fd)

    def wake_when_writable(self, source: zmq.Socket[bytes]) -> None:
        """Ends the next wait once this socket takes messages again."""
        self._register(source, _WRITABLE, lambda: self.forget(source), told=False)

    def every(self, period_s: float, handler: Handler, first_s: float | None = None) -> Timer:
        """Calls `handler` every `period_s`, first after `first_s` (default: one period)."""
        timer = Timer(period_s, handler)
        self._schedule(timer, period_s if first_s is None else first_s)
        return timer

    def after(self, delay_s: float, handler: Handler) -> Timer:
        """Calls `handler` once."""
        timer = Timer(0.0, handler)
        self._schedule(timer, delay_s)
        return timer

    def on_signal(self, number: signal.Signals, handler: Handler) -> None:
        """Calls `handler` in the loop (not inside the interrupted code) when the signal arrives."""
        if self._previous_wakeup_fd is None:
            self._previous_wakeup_fd = signal.set_wakeup_fd(
                self._wake_send.fileno(), warn_on_full_buffer=False
            )
        self._signal_handlers[number] = handler
        self._previous_signals[number] = signal.signal(number, _noted)

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT end the loop after the current handler."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.on_signal(number, lambda number=number: self.stop(number.name))  # type: ignore[misc]

    def stop(self, reason: str) -> None:
        self.stopping = True
        self.stop_reason = self.stop_reason or reason

    def wake(self) -> None:
        """Ends the present wait, or the next one; the only call here that another thread may make."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits any more
            self._wake_send.send(b"\0")

    def turn(self, block: bool) -> None:
        """One round: waits (if `block`) for anything to do, then does all that is due."""
        self._wait_and_handle(self._remaining_ms() if block and not self.stopping else 0)

    def turn_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Turns until the condition holds, even while stopping. False: `timeout_s` was over first."""
        deadline = self.after(timeout_s, lambda: None)
        due = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < due:
            self._wait_and_handle(self._remaining_ms())
        deadline.cancel()
        return condition()

    def close(self) -> None:
        if self._previous_wakeup_fd is not None:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            for number, previous in self._previous_signals.items():
                signal.signal(number, previous)  # type: ignore[arg-type]
        self._wake_receive.close()
        self._wake_send.close()

    def _schedule(self, timer: Timer, delay_s: float) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))

    def _register(
        self, source: zmq.Socket[bytes] | int, wanted: int, handler: Handler, *, told: bool
    ) -> Source:
        self.forget(source)
        if isinstance(source, int):
            made = Source(source, None, wanted, handler, told=True, doubtful=False)
        else:
            made = Source(int(source.get(zmq.FD)), source, wanted, handler, told)
        self._sources[source] = self._by_fd[made.fd] = made
        self._poll.register(made.fd, select.POLLIN)
        return made

    def _wait_and_handle(self, timeout_ms: int) -> None:
        # What was used may have a message although its descriptor is silent; what comes now wakes the poll.
        due = [source for source in self._sources.values() if source.doubtful and source.due()]
        for fd, _events in self._poll.poll(0 if due else timeout_ms):
            source = self._by_fd[fd]
            if source not in due and (source.told or source.due()):
                due.append(source)
        for source in due:
            if self._by_fd.get(source.fd) is source:  # not forgotten by a handler before it
                source.doubtful = source.socket is not None
                source.handler()
        self._run_timers()

    def _remaining_ms(self) -> int:
        """Until the next timer; -1: there is none."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        remaining_s = self._timers[0][0] - time.monotonic()
        return max(
            0, int(remaining_s * 1000) + 1
        )  # rounded up: waking early would spin until the timer is due

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _due, _order, timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            if timer.period_s:
                self._schedule(timer, timer.period_s)
            timer.handler()

    def _on_wakeup(self) -> None:
        try:
            numbers = os.read(self._wake_receive.fileno(), 4096)
        except BlockingIOError:
            return
        for number in set(numbers):
            handler = self._signal_handlers.get(number)
            if handler is not None:
                handler()


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The Python-level signal handler: the wake-up descriptor carries the news into the loop."""
