"""Running means of what updates report, emptied by each heartbeat."""

from __future__ import annotations

import time

from services.learner.training import UpdateReport


class Figures:
    """Sums between two heartbeats; the last means stand while nothing is trained."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0
        self._since = time.monotonic()
        self._last: dict[str, float] = {}

    def add(self, report: UpdateReport, lag: float) -> None:
        values = {
            "loss": report.loss,
            "td": report.td,
            "q_mean": report.q_mean,
            "grad_norm": report.grad_norm,
            "lag": lag,
        }
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._sums["q_max"] = max(self._sums.get("q_max", report.q_max), report.q_max)
        self._count += 1

    def take(self) -> dict[str, float]:
        """The means since the last call, and updates per second."""
        now = time.monotonic()
        elapsed_s = now - self._since
        if elapsed_s < 0.05:
            return self._last
        if self._count:
            self._last = {name: value / self._count for name, value in self._sums.items() if name != "q_max"}
            self._last["q_max"] = self._sums["q_max"]
        self._last = self._last | {"updates_per_s": self._count / elapsed_s}
        self._sums, self._count, self._since = {}, 0, now
        return self._last
