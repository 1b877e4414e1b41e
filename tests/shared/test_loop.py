from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from shared.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


class Sockets:
    """Sockets that are closed before they are forgotten."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []

    def make(self, kind: int) -> zmq.Socket[bytes]:
        self._made.append(self.context.socket(kind))
        return self._made[-1]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.context.destroy(linger=0)


def test_timers_fall_due_in_the_order_of_their_times(loop: Loop) -> None:
    """What is due first is called first, whenever it was set up; equal times keep their order."""
    calls: list[str] = []
    for name, delay_s in (("late", 0.03), ("early", 0.01), ("first", 0.0), ("second", 0.0)):
        loop.after(delay_s, lambda name=name: calls.append(name))
    assert loop.turn_until(lambda: len(calls) == 4, 5.0)
    assert calls == ["first", "second", "early", "late"]


def test_single_timer_is_called_once(loop: Loop) -> None:
    """`after` does not repeat."""
    calls: list[int] = []
    loop.after(0.0, lambda: calls.append(1))
    loop.turn_until(lambda: False, 0.03)
    assert calls == [1]


def test_repeating_timer_is_called_again_and_again_from_its_first_time_on(loop: Loop) -> None:
    """`every` repeats; `first_s` says when it begins."""
    times: list[float] = []
    started = time.monotonic()
    loop.every(0.02, lambda: times.append(time.monotonic() - started), first_s=0.0)
    assert loop.turn_until(lambda: len(times) >= 3, 5.0)
    assert times[1] >= 0.02
    assert times[2] >= 0.04


def test_cancelled_timer_is_not_called_again(loop: Loop) -> None:
    """Cancelling works before the first call, inside a call and from another timer's call."""
    calls: list[str] = []
    loop.after(0.01, lambda: calls.append("never")).cancel()

    def once() -> None:
        calls.append("once")
        repeating.cancel()
        other.cancel()

    repeating = loop.every(0.005, once)
    other = loop.after(0.005, lambda: calls.append("other"))
    loop.turn_until(lambda: False, 0.04)
    assert calls == ["once"]


def test_timer_slower_than_its_period_lets_others_in(loop: Loop) -> None:
    """A handler that takes longer than its period does not starve the loop."""
    calls: list[int] = []

    def slow() -> None:
        until = time.monotonic() + 0.005
        while time.monotonic() < until:
            pass
        calls.append(1)

    loop.every(0.001, slow, first_s=0.0)
    loop.turn(block=True)
    assert len(calls) == 1


def test_blocked_turn_uses_no_processor_time(loop: Loop) -> None:
    """Waiting happens in the operating system, and a timer is not woken for too early."""
    calls: list[int] = []
    loop.after(0.3, lambda: calls.append(1))
    used, turns = time.thread_time(), 0
    while not calls:
        loop.turn(block=True)
        turns += 1
    assert turns <= 3
    assert time.thread_time() - used < 0.05


def test_turn_that_may_not_block_returns_at_once(loop: Loop) -> None:
    """With work to do, the loop only looks; while stopping it never blocks."""
    loop.after(60.0, lambda: None)
    started = time.monotonic()
    loop.turn(block=False)
    loop.stop("enough")
    loop.turn(block=True)
    assert time.monotonic() - started < 1.0


def test_signal_during_a_turn_is_handled_in_the_loop(loop: Loop) -> None:
    """The handler runs in the loop's next turn, not inside the code that was interrupted."""
    calls: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: calls.append("signal"))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == []
    loop.turn(block=True)
    assert calls == ["signal"]


def test_stop_signals_end_the_loop_with_their_name(loop: Loop) -> None:
    """SIGTERM and SIGINT are requests to stop; the first reason stays."""
    loop.stop_on_signals()
    os.kill(os.getpid(), signal.SIGINT)
    loop.turn(block=True)
    os.kill(os.getpid(), signal.SIGTERM)
    loop.turn(block=True)
    assert loop.stopping
    assert loop.stop_reason == "SIGINT"


def test_closed_loop_gives_signals_back() -> None:
    """What handled a signal before handles it again."""
    before = signal.getsignal(signal.SIGUSR1)
    loop = Loop()
    loop.on_signal(signal.SIGUSR1, lambda: None)
    assert signal.getsignal(signal.SIGUSR1) is not before
    loop.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_turn_until_a_condition_that_comes_true_ends_then(loop: Loop) -> None:
    """The condition is looked at after every event, even while stopping."""
    calls: list[int] = []
    loop.stop("already")
    loop.after(0.02, lambda: calls.append(1))
    assert loop.turn_until(lambda: bool(calls), 5.0)


def test_turn_until_a_condition_that_stays_false_ends_in_time_without_spinning(loop: Loop) -> None:
    """False comes back after the time given, and few looks were needed."""
    looks = 0

    def never() -> bool:
        nonlocal looks
        looks += 1
        return False

    started = time.monotonic()
    assert not loop.turn_until(never, 0.1)
    assert 0.1 <= time.monotonic() - started < 2.0
    assert looks <= 5


def test_readable_socket_calls_its_handler_until_it_is_forgotten(loop: Loop, sockets: Sockets) -> None:
    """A message wakes a blocked turn; a forgotten socket does not."""
    receive, send = sockets.make(zmq.PAIR), sockets.make(zmq.PAIR)
    receive.bind("inproc://here")
    send.connect("inproc://here")
    got: list[bytes] = []
    loop.on_readable(receive, lambda: got.append(receive.recv()))
    send.send(b"one")
    loop.turn(block=True)
    loop.forget(receive)
    loop.forget(receive)
    send.send(b"two")
    loop.turn(block=False)
    assert got == [b"one"]


def test_socket_that_becomes_writable_ends_the_wait_once(loop: Loop, sockets: Sockets) -> None:
    """A full link that has room again wakes the loop, and then no more: it would spin."""
    push = sockets.make(zmq.PUSH)
    push.setsockopt(zmq.IMMEDIATE, 1)
    push.set_hwm(1)
    port = push.bind_to_random_port("tcp://127.0.0.1")
    loop.wake_when_writable(push)
    assert not loop.turn_until(lambda: push.poll(0, zmq.POLLOUT) != 0, 0.05)
    pull = sockets.make(zmq.PULL)
    pull.connect(f"tcp://127.0.0.1:{port}")
    assert loop.turn_until(lambda: push.poll(0, zmq.POLLOUT) != 0, 5.0)
    looks: list[int] = []
    loop.turn_until(lambda: bool(looks.append(1)), 0.05)
    assert len(looks) <= 6


def test_wake_from_another_thread_ends_the_wait(loop: Loop) -> None:
    """A thread that has finished something need not wait for the next timer to be noticed."""
    loop.after(60.0, lambda: None)
    waker = threading.Thread(target=loop.wake)
    started = time.monotonic()
    waker.start()
    loop.turn(block=True)
    waker.join()
    assert time.monotonic() - started < 30.0


def test_wake_of_a_closed_loop_does_nothing() -> None:
    """A thread may finish after everything has ended."""
    loop = Loop()
    loop.close()
    loop.wake()
