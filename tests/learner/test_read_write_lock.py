from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from services.learner.read_write_lock import ReadWriteLock
from shared.errors import Stuck

PATIENCE_S = 20.0


def start(*targets: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def wait_until_writer_waits(lock: ReadWriteLock) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not lock._waiting_writers:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_readers_hold_the_lock_at_the_same_time() -> None:
    """All of them meet inside: none could leave if one had been kept out."""
    lock, meeting = ReadWriteLock(), threading.Barrier(8)

    def read() -> None:
        with lock.reading():
            meeting.wait(PATIENCE_S)

    join(start(*[read] * 8))
    assert not meeting.broken


def test_writer_is_alone() -> None:
    """Unprotected read-modify-writes by writers lose nothing, and no reader ever sees one half done."""
    lock, pair, torn = ReadWriteLock(), [0, 0], []

    def write() -> None:
        for _ in range(200):
            with lock.writing():
                first = pair[0]
                time.sleep(0)  # lets another thread in, if the lock does
                pair[0] = first + 1
                pair[1] = pair[0]

    def read() -> None:
        for _ in range(200):
            with lock.reading():
                first = pair[0]
                time.sleep(0)
                if pair[1] != first:
                    torn.append(tuple(pair))

    join(start(*[write] * 4, *[read] * 4))
    assert pair == [800, 800]
    assert not torn


def test_writer_waits_for_every_reader() -> None:
    """It comes in after the last of them, and says how long it stood outside."""
    lock, events = ReadWriteLock(), []
    waited: list[float] = []

    def write() -> None:
        with lock.writing() as waited_s:
            events.append("write")
            waited.append(waited_s)

    with lock.reading() as free_s:
        threads = start(write)
        wait_until_writer_waits(lock)
        time.sleep(0.02)
        events.append("read")
    join(threads)
    assert events == ["read", "write"]
    assert waited[0] >= 0.02
    assert free_s < waited[0]


def test_writer_is_not_starved_by_a_stream_of_readers() -> None:
    """Readers that overlap without a gap never leave the lock free; the writer still comes in."""
    lock, wrote = ReadWriteLock(), threading.Event()
    inside = threading.Semaphore(0)

    def read() -> None:
        while not wrote.is_set():
            with lock.reading():
                inside.release()
                time.sleep(0.002)

    def write() -> None:
        with lock.writing():
            wrote.set()

    readers = start(*[read] * 6)
    for _ in range(30):  # the stream flows
        assert inside.acquire(timeout=PATIENCE_S)
    join(start(write) + readers)
    assert wrote.is_set()


def test_reader_stands_back_for_a_waiting_writer() -> None:
    """While one reader is inside and a writer waits, a second reader comes after the writer."""
    lock, events = ReadWriteLock(), []

    def write() -> None:
        with lock.writing():
            events.append("write")

    def read() -> None:
        with lock.reading():
            events.append("read")

    with lock.reading():
        threads = start(write)
        wait_until_writer_waits(lock)
        threads += start(read)
        threads[-1].join(0.05)
        assert events == []
    join(threads)
    assert events == ["write", "read"]


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_exception_inside_releases_the_lock(way: str) -> None:
    """It passes through, and the next one comes in at once."""
    lock = ReadWriteLock()
    with pytest.raises(KeyError), getattr(lock, way)():
        raise KeyError
    for again in (lock.writing, lock.reading):
        with again(timeout_s=0.1):
            pass


@pytest.mark.parametrize("first", ["reading", "writing"])
@pytest.mark.parametrize("second", ["reading", "writing"])
def test_lock_taken_twice_by_one_thread_raises(first: str, second: str) -> None:
    """Each of the four would wait for itself; what was held stays held and is released as usual."""
    lock = ReadWriteLock()
    with getattr(lock, first)():
        with pytest.raises(RuntimeError, match=r"holds the (read|write) lock already"):
            getattr(lock, second)().__enter__()
        assert lock._waiting_writers == 0
    with lock.writing(timeout_s=0.1):
        pass


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_timeout_says_who_holds_the_lock(way: str) -> None:
    """The one who gave up leaves no trace: readers that stood back for it come in."""
    lock, release = ReadWriteLock(), threading.Event()
    holding = threading.Event()

    def hold() -> None:
        with lock.reading() if way == "writing" else lock.writing():
            holding.set()
            release.wait(PATIENCE_S)

    threads = start(hold)
    assert holding.wait(PATIENCE_S)
    with pytest.raises(Stuck, match="1 readers and 0 writer" if way == "writing" else "0 readers and 1"):
        getattr(lock, way)(timeout_s=0.02).__enter__()
    if way == "writing":
        with lock.reading(timeout_s=0.1):
            pass
    release.set()
    join(threads)
    with lock.writing(timeout_s=0.1):
        pass


def test_writer_that_gives_up_lets_standing_readers_in() -> None:
    """A reader kept out only by a waiting writer is woken when that writer leaves."""
    lock, read = ReadWriteLock(), threading.Event()

    def write() -> None:
        with pytest.raises(Stuck), lock.writing(timeout_s=0.1):
            pass

    def read_on() -> None:
        with lock.reading():
            read.set()

    with lock.reading():
        threads = start(write)
        wait_until_writer_waits(lock)
        threads += start(read_on)
        assert read.wait(PATIENCE_S)
    join(threads)


@pytest.mark.parametrize("seed", range(4))
def test_random_mix_of_everything_ends_and_never_overlaps(seed: int) -> None:
    """Reads, writes, time-outs and exceptions in any order: no deadlock, no overlap, nobody left inside."""
    lock, inside, wrong = ReadWriteLock(), {"reading": 0, "writing": 0}, []
    counting = threading.Lock()

    def visit(way: str, rng: random.Random) -> None:
        with getattr(lock, way)(rng.choice([None, 0.0, 0.001])):
            with counting:
                inside[way] += 1
                if inside["writing"] > (way == "writing") or (inside["writing"] and inside["reading"]):
                    wrong.append(dict(inside))
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.0005)
            with counting:
                inside[way] -= 1
            if rng.random() < 0.1:
                raise KeyError

    def roam(number: int) -> Callable[[], None]:
        rng = random.Random(seed * 100 + number)

        def run() -> None:
            for _ in range(150):
                try:
                    visit(rng.choice(["reading", "reading", "writing"]), rng)
                except (KeyError, Stuck):
                    continue

        return run

    join(start(*[roam(number) for number in range(8)]))
    assert not wrong
    assert inside == {"reading": 0, "writing": 0}
    with lock.writing(timeout_s=0.1):
        pass
