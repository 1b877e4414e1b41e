"""Who trains: the loop's own thread, or several gradient workers that share one set of weights (MISSION L6).

A worker computes the gradient of its own batch, forward and backward, under the read lock, beside the others;
then it clips, steps and moves the target alone, under the write lock. So every gradient is exactly that of
the weights it was computed on, and whoever copies the weights under the read lock copies no half step. What
a worker made goes back to the loop's thread, which does everything else.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from services.learner.algorithms.base import Algorithm, UpdateReport
from services.learner.contention import Contention, Waits
from services.learner.outcome import Outcome
from services.learner.read_write_lock import ReadWriteLock
from shared.config import LearnerConfig
from shared.errors import Stuck
from shared.layout import Arrays
from shared.logs import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch that was trained on. `report` is None when its update was not finite and did not count."""

    draw: int
    arrays: Arrays
    report: UpdateReport | None


class Trainer(ABC):
    """Turns batches into updates. Everything here is called by the loop's thread."""

    @property
    @abstractmethod
    def room(self) -> int:
        """How many batches it takes now."""

    @abstractmethod
    def train(self, draw: int, arrays: Arrays) -> None:
        """Takes a batch; there must be room."""

    @abstractmethod
    def finished(self, idle: bool) -> list[Trained]:
        """What was trained since the last call; raises what a worker raised, or Stuck.

        `idle`: there is no other batch to train on meanwhile, so waiting for a GPU costs nothing.
        """

    @property
    def untrained(self) -> int:
        """Batches that were taken and are not in the weights; exact while `reading`, or once stopped."""
        return 0

    @property
    @abstractmethod
    def oldest_start(self) -> float | None:
        """When the update began that runs longest, in time.monotonic(); None: none runs. For any thread."""

    def reading(self) -> AbstractContextManager[object]:
        """Nobody changes the weights inside: to publish them and to keep them."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """Figures for heartbeats."""
        return {}

    def stop(self, timeout_s: float) -> bool:
        """Ends the workers after the updates that they are in; batches that nobody began stay untrained.

        False: one was still in an update when the time was over, and is left behind.
        """
        return True


def open_trainer(algorithm: Algorithm, config: LearnerConfig, wake: Callable[[], None]) -> Trainer:
    """One worker is the loop's own thread; more are threads, which `wake` the loop."""
    if config.workers == 1:
        return OwnThread(algorithm)
    if algorithm.device.type == "cuda":
        log.warning("a GPU runs the workers' updates one after another: learner.workers = 1 is faster there")
    return GradientWorkers(algorithm, config, wake)


class OwnThread(Trainer):
    """Trains in the loop's thread, without a lock. On a GPU an update is read after the next was launched."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._launched: deque[tuple[int, Arrays, Outcome]] = deque()
        self._taken = False
        self._started: float | None = None

    @property
    def room(self) -> int:
        return 0 if self._taken else 1

    def train(self, draw: int, arrays: Arrays) -> None:
        self._started = time.monotonic()
        gradients = self._algorithm.gradients(arrays)
        self._launched.append((draw, arrays, self._algorithm.apply(gradients)))
        self._taken, self._started = True, None

    def finished(self, idle: bool) -> list[Trained]:
        self._taken = False
        trained = []
        while self._launched and (idle or len(self._launched) > 1 or self._launched[0][2].arrived):
            draw, arrays, outcome = self._launched.popleft()
            trained.append(Trained(draw, arrays, self._algorithm.settle(outcome)))
        return trained

    @property
    def oldest_start(self) -> float | None:
        return self._started


class GradientWorkers(Trainer):
    """Threads that each work on a batch of their own."""

    def __init__(self, algorithm: Algorithm, config: LearnerConfig, wake: Callable[[], None]) -> None:
        self._algorithm, self._config, self._wake = algorithm, config, wake
        self._lock = ReadWriteLock()
        self._queue: queue.SimpleQueue[tuple[int, Arrays] | None] = queue.SimpleQueue()
        self._done: deque[tuple[Trained, Waits]] = deque()  # appended to by workers, emptied by the loop
        self._failures: deque[BaseException] = deque()
        self._started: list[float | None] = [None] * config.workers  # each worker writes its own place
        self._stopping = threading.Event()
        self._taken = 0  # the loop's
        self._handed_back = 0  # the loop's
        self._applied = 0  # changed in the write phase
        self._contention = Contention(config.workers)
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"worker-{number}", daemon=True)
            for number in range(config.workers)  # daemons: a stuck one must not keep the process alive
        ]
        for thread in self._threads:
            thread.start()

    # --- the loop's thread ------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """One batch that each is on, and one that each finds when it is done."""
        return 2 * self._config.workers - (self._taken - self._handed_back)

    def train(self, draw: int, arrays: Arrays) -> None:
        self._taken += 1
        self._queue.put((draw, arrays))

    def finished(self, idle: bool) -> list[Trained]:
        if self._failures:
            raise self._failures[0]
        self._refuse_stuck()
        trained = []
        while self._done:
            each, waits = self._done.popleft()
            self._contention.add(waits)
            trained.append(each)
        self._handed_back += len(trained)
        return trained

    @property
    def untrained(self) -> int:
        return self._taken - self._applied

    @property
    def oldest_start(self) -> float | None:
        return min((start for start in self._started if start is not None), default=None)

    def reading(self) -> AbstractContextManager[object]:
        # Not for ever: behind a stuck worker even the read lock is never free, and the loop must notice.
        return self._lock.reading(self._config.update_deadline_s)

    def metrics(self) -> dict[str, float]:
        return self._contention.take()

    def stop(self, timeout_s: float) -> bool:
        self._stopping.set()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            log.warning("left behind in an update", workers=late)
        return not late

    def _refuse_stuck(self) -> None:
        start, deadline_s = self.oldest_start, self._config.update_deadline_s
        if start is not None and time.monotonic() - start > deadline_s:
            raise Stuck(
                f"a gradient worker has been in one update for more than {deadline_s:g} s "
                "(learner.update_deadline_s)"
            )

    # --- the workers' threads ---------------------------------------------------------------------------

    def _run(self, number: int) -> None:
        torch.set_num_threads(self._config.threads)  # each thread has its own setting
        try:
            while (batch := self._queue.get()) is not None and not self._stopping.is_set():
                self._started[number] = time.monotonic()
                self._done.append(self._update(number, *batch))
                self._started[number] = None
                self._wake()
        except BaseException as error:  # noqa: BLE001 - raised again in the loop's thread
            self._failures.append(error)
            self._started[number] = None
            self._wake()

    def _update(self, number: int, draw: int, arrays: Arrays) -> tuple[Trained, Waits]:
        began = time.perf_counter()
        with self._lock.reading() as read_wait_s:
            gradients = self._algorithm.gradients(arrays)
        with self._lock.writing() as write_wait_s:
            report = self._algorithm.settle(self._algorithm.apply(gradients))
            self._applied += 1
        work_s = time.perf_counter() - began - read_wait_s - write_wait_s
        return Trained(draw, arrays, report), Waits(number, read_wait_s, write_wait_s, work_s)
