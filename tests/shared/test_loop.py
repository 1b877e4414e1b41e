from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from shared.loop import Loop, Source


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


def pair(sockets: Sockets) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Two that are connected over tcp, as services are."""
    ours, theirs = sockets.make(zmq.DEALER), sockets.make(zmq.DEALER)
    theirs.connect(f"tcp://127.0.0.1:{ours.bind_to_random_port('tcp://127.0.0.1')}")
    return ours, theirs


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Asks the socket, which takes the news from its descriptor."""
    return bool(socket.poll(5_000))


def test_message_whose_news_a_send_took_from_the_descriptor_is_handled(loop: Loop, sockets: Sockets) -> None:
    """Whoever uses a socket outside its handler takes the wake-up along; the loop looks for itself."""
    ours, theirs = pair(sockets)
    got: list[bytes] = []
    loop.on_readable(ours, lambda: got.append(ours.recv()))
    loop.turn(block=False)
    loop.after(30.0, lambda: None)
    for number in range(50):
        theirs.send(b"question")
        assert has_come(ours)
        ours.send(b"an answer to somebody else")
        started = time.monotonic()
        loop.turn(block=True)
        assert len(got) == number + 1
        assert time.monotonic() - started < 20.0


def taking_all(
    socket: zmq.Socket[bytes], take: Callable[[bytes], None], source: list[Source]
) -> Callable[[], None]:
    """A handler for a source that is told of uses: takes what is there, be it nothing, and says so."""

    def handle() -> None:
        while True:
            try:
                message = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            take(message)
        source[0].emptied()

    return handle


def test_message_whose_news_a_reported_send_took_is_handled(loop: Loop, sockets: Sockets) -> None:
    """A socket that its handler found empty is not asked again, unless somebody says that he used it."""
    ours, theirs = pair(sockets)
    got: list[bytes] = []
    source: list[Source] = []
    source.append(loop.on_readable(ours, taking_all(ours, got.append, source), told=True))
    loop.after(60.0, lambda: None)
    theirs.send(b"first")
    assert loop.turn_until(lambda: len(got) == 1, 5.0)
    for number in range(50):
        loop.turn(block=False)
        theirs.send(b"question")
        assert has_come(ours)
        source[0].used()
        started = time.monotonic()
        loop.turn(block=True)
        assert len(got) == number + 2
        assert time.monotonic() - started < 20.0


def test_thousands_of_messages_between_told_sources_are_all_handled_without_a_timer(
    loop: Loop, sockets: Sockets
) -> None:
    """Sends from handlers, and from between the turns: no order of them leaves a message lying."""
    ours, theirs = pair(sockets)
    ours_source: list[Source] = []
    theirs_source: list[Source] = []
    answered: list[bytes] = []
    waiting: list[bytes] = []

    def ask_again(answer: bytes) -> None:
        answered.append(answer)
        theirs.send(answer)

    handlers = (
        (ours, taking_all(ours, waiting.append, ours_source), ours_source),
        (theirs, taking_all(theirs, ask_again, theirs_source), theirs_source),
    )
    for socket, handler, source in handlers:
        source.append(loop.on_readable(socket, handler, told=True))
    for _ in range(3):
        theirs.send(b"first")
        theirs_source[0].used()
    loop.after(60.0, lambda: loop.stop("a message was left lying"))
    while len(answered) < 5_000 and not loop.stopping:
        loop.turn(block=True)
        while waiting:
            ours.send(waiting.pop())
            ours_source[0].used()
    assert len(answered) >= 5_000


def test_message_of_a_told_source_is_handled_after_a_handler_before_it_has_failed(
    loop: Loop, sockets: Sockets
) -> None:
    """The loop had asked its socket and so taken the news; whoever turns on after the error must hear it."""
    failing, feeding = pair(sockets)
    ours, theirs = pair(sockets)
    got: list[bytes] = []
    source: list[Source] = []

    def fail() -> None:
        failing.recv()
        raise ArithmeticError

    loop.on_readable(failing, fail)
    source.append(loop.on_readable(ours, taking_all(ours, got.append, source), told=True))
    for number in range(10):
        source[0].used()
        feeding.send(b"go")
        theirs.send(b"question")
        assert has_come(ours)
        assert has_come(failing)
        with pytest.raises(ArithmeticError):
            loop.turn(block=True)
        loop.after(60.0, lambda: None)
        started = time.monotonic()
        while len(got) <= number and time.monotonic() - started < 20.0:
            loop.turn(block=True)
        assert len(got) == number + 1
        assert time.monotonic() - started < 20.0


def test_handler_that_takes_one_of_many_is_called_until_none_is_left(loop: Loop, sockets: Sockets) -> None:
    """A handler may stop at a bound; what it left is found without anything new arriving."""
    ours, theirs = pair(sockets)
    got: list[bytes] = []

    def take_one() -> None:
        with contextlib.suppress(zmq.Again):
            got.append(ours.recv(zmq.NOBLOCK))

    loop.on_readable(ours, take_one, told=True)
    for number in range(100):
        theirs.send(b"%d" % number)
    assert loop.turn_until(lambda: len(got) == 100, 5.0)
    assert got == [b"%d" % number for number in range(100)]


def test_thousands_of_messages_back_and_forth_are_all_handled_without_a_timer(
    loop: Loop, sockets: Sockets
) -> None:
    """No order of arrivals, answers and waits leaves a message lying: nothing else would wake this loop."""
    ours, theirs = pair(sockets)
    answered = 0

    def answer() -> None:
        ours.send(ours.recv())

    def ask_again() -> None:
        nonlocal answered
        theirs.recv()
        answered += 1
        theirs.send(b"again")

    loop.on_readable(ours, answer)
    loop.on_readable(theirs, ask_again)
    for _ in range(3):
        theirs.send(b"first")
    assert loop.turn_until(lambda: answered >= 5_000, 60.0)


def test_busy_socket_does_not_keep_signals_from_being_handled(loop: Loop, sockets: Sockets) -> None:
    """While messages wait the loop does not wait, but it looks at everything else all the same."""
    ours, theirs = pair(sockets)
    calls: list[str] = []
    loop.on_readable(ours, lambda: None)  # never takes what is there
    loop.on_signal(signal.SIGUSR1, lambda: calls.append("signal"))
    theirs.send(b"stays")
    assert has_come(ours)
    os.kill(os.getpid(), signal.SIGUSR1)
    loop.turn(block=True)
    assert calls == ["signal"]


def test_source_that_another_handler_forgets_is_not_called_any_more(loop: Loop, sockets: Sockets) -> None:
    """Both have something to do in the same turn; the first closes the second."""
    first, to_first = pair(sockets)
    second, to_second = pair(sockets)
    calls: list[str] = []

    def close_second() -> None:
        calls.append(first.recv().decode())
        loop.forget(second)
        second.close()

    loop.on_readable(first, close_second)
    loop.on_readable(second, lambda: calls.append("second"))
    to_first.send(b"first")
    to_second.send(b"second")
    assert has_come(first)
    assert has_come(second)
    loop.turn(block=True)
    assert calls == ["first"]


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
