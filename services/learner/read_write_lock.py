"""A lock that many readers hold at once, or one writer alone. Writers go first.

A writer that waits keeps new readers out, so a stream of readers cannot starve it. That is also why nobody
may take the lock twice: a reader that asks again behind a waiting writer would wait for a writer that waits
for it. Such calls raise instead.

    with lock.reading() as waited_s: ...
    with lock.writing() as waited_s: ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.errors import Stuck


class ReadWriteLock:
    """Both ways in say how long they waited; with a `timeout_s`, Stuck is raised when it is over."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers: set[int] = set()  # threads
        self._writer: int | None = None
        self._waiting_writers = 0

    @contextmanager
    def reading(self, timeout_s: float | None = None) -> Iterator[float]:
        """Holds the lock beside other readers."""
        thread, began = threading.get_ident(), time.perf_counter()
        with self._condition:
            self._refuse_second(thread)
            self._wait(lambda: self._writer is None and not self._waiting_writers, timeout_s, "read")
            self._readers.add(thread)
        try:
            yield time.perf_counter() - began
        finally:
            with self._condition:
                self._readers.remove(thread)
                if not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def writing(self, timeout_s: float | None = None) -> Iterator[float]:
        """Holds the lock alone."""
        thread, began = threading.get_ident(), time.perf_counter()
        with self._condition:
            self._refuse_second(thread)
            self._waiting_writers += 1
            try:
                self._wait(lambda: self._writer is None and not self._readers, timeout_s, "write")
                self._writer = thread
            finally:
                self._waiting_writers -= 1
                if self._writer != thread:
                    self._condition.notify_all()  # readers that stood back for this one
        try:
            yield time.perf_counter() - began
        finally:
            with self._condition:
                self._writer = None
                self._condition.notify_all()

    def _wait(self, free: Callable[[], bool], timeout_s: float | None, purpose: str) -> None:
        if not self._condition.wait_for(free, timeout_s):
            raise Stuck(
                f"no {purpose} lock in {timeout_s:g} s: held by {len(self._readers)} readers and "
                f"{0 if self._writer is None else 1} writer, {self._waiting_writers} writers waiting"
            )

    def _refuse_second(self, thread: int) -> None:
        if thread == self._writer or thread in self._readers:
            held = "write" if thread == self._writer else "read"
            raise RuntimeError(
                f"this thread holds the {held} lock already and would wait for itself; leave it first"
            )
