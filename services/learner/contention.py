"""How long gradient workers wait for each other (MISSION L7), and when that is worth a word.

    ratio = wait / (wait + work), of each worker and of all, since the last heartbeat

A mean wait of more than 10 ms is a warning, a ratio of more than 0.5 an alarm: most of what the workers do
is waiting, and fewer would be as fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.logs import get_logger

log = get_logger()

WARNING_WAIT_S = 0.010
ALARM_RATIO = 0.5
SAY_AGAIN_S = 60.0
SHORTEST_S = 0.05  # two questions at almost the same time get the same answer


@dataclass(frozen=True, slots=True)
class Waits:
    """One update of one worker."""

    worker: int
    read_wait_s: float
    write_wait_s: float
    work_s: float


class _Sums:
    def __init__(self) -> None:
        self.updates = 0
        self.read_wait_s = self.write_wait_s = self.work_s = 0.0

    def add(self, waits: Waits) -> None:
        self.updates += 1
        self.read_wait_s += waits.read_wait_s
        self.write_wait_s += waits.write_wait_s
        self.work_s += waits.work_s

    @property
    def wait_s(self) -> float:
        """The mean wait of an update, for both locks together."""
        return (self.read_wait_s + self.write_wait_s) / self.updates

    @property
    def ratio(self) -> float:
        wait_s = self.read_wait_s + self.write_wait_s
        return wait_s / (wait_s + self.work_s) if wait_s else 0.0

    def figures(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}read_wait_ms": 1e3 * self.read_wait_s / self.updates,
            f"{prefix}write_wait_ms": 1e3 * self.write_wait_s / self.updates,
            f"{prefix}contention": self.ratio,
        }


class Contention:
    """Belongs to the loop's thread: updates bring their waits along when they come back."""

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers = workers
        self._start_over()
        self._last: dict[str, float] = {"contention_alarms": 0.0}
        self._alarms = 0
        self._said: dict[str, float] = {}  # when each kind of line was last logged

    def add(self, waits: Waits) -> None:
        self._all.add(waits)
        self._each[waits.worker].add(waits)

    def take(self) -> dict[str, float]:
        """Means since the last call; the last ones stand while nothing is trained."""
        if not self._all.updates or self._clock() - self._since < SHORTEST_S:
            return self._last
        self._judge()
        self._last = self._last | self._all.figures("") | {"contention_alarms": float(self._alarms)}
        for number, sums in enumerate(self._each):
            if sums.updates:
                self._last |= sums.figures(f"worker.{number}.")
        self._start_over()
        return self._last

    def _start_over(self) -> None:
        self._since = self._clock()
        self._all = _Sums()
        self._each = [_Sums() for _ in range(self._workers)]

    def _judge(self) -> None:
        ratio, wait_ms = round(self._all.ratio, 3), round(1e3 * self._all.wait_s, 1)
        if self._all.ratio > ALARM_RATIO:
            self._alarms += 1
            if self._may_say("alarm"):
                log.error(
                    "gradient workers mostly wait for each other; fewer learner.workers would do",
                    contention=ratio,
                    wait_ms=wait_ms,
                    alarms=self._alarms,
                )
        elif self._all.wait_s > WARNING_WAIT_S and self._may_say("warning"):
            log.warning("gradient workers wait for each other", contention=ratio, wait_ms=wait_ms)

    def _may_say(self, what: str) -> bool:
        now = self._clock()
        if now - self._said.get(what, -SAY_AGAIN_S) < SAY_AGAIN_S:
            return False
        self._said[what] = now
        return True
