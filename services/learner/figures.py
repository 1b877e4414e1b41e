"""Running means of what updates report, emptied by each heartbeat."""

from __future__ import annotations

import time

from services.learner.algorithms.base import UpdateReport


class Mean:
    """A sum and how many values it has."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


class Figures:
    """Means between two heartbeats; the last ones stand while nothing is trained."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}
        self._updates = 0
        self._since = time.monotonic()
        self._last: dict[str, float] = {}

    def add(self, report: UpdateReport, age: float) -> None:
        """`age` is how many versions ago the batch's actions were chosen, on average."""
        values = {"loss": report.loss, "grad_norm": report.grad_norm, "batch_age": age, **report.figures}
        for name, value in values.items():
            self._means.setdefault(name, Mean()).add(value)
        self._updates += 1

    def take(self) -> dict[str, float]:
        """The means since the last call, and updates per second."""
        now = time.monotonic()
        elapsed_s = now - self._since
        if elapsed_s < 0.05:
            return self._last
        means = {name: mean.total / mean.count for name, mean in self._means.items()}
        self._last = self._last | means | {"updates_per_s": self._updates / elapsed_s}
        self._means, self._updates, self._since = {}, 0, now
        return self._last
