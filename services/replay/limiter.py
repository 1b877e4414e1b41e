"""Owns the balance between inserts and samples of one agent: who has to wait, and why, in words.

Once `min_steps` are in, each further step pays for `samples_per_insert` samples. `ahead` is what is paid for
and not yet drawn: the actors are ahead while it is above the tolerance, the learner while a draw would take
it below minus the tolerance. Filling up to min_steps pays for nothing, so it leaves no debt. With an
interval, steps pay when so many of them are together, so that batches come in bursts. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shared.config.sections import MAX_SAMPLES_PER_INSERT
from shared.errors import Refused


class Limiter:
    """The counts it needs are attributes, kept up to date by the buffer."""

    def __init__(
        self, min_steps: int, samples_per_insert: float, tolerance_samples: float, interval_steps: int = 1
    ) -> None:
        self.min_steps = min_steps
        self.interval_steps = interval_steps
        self.samples_per_insert = samples_per_insert
        self.tolerance_samples = tolerance_samples
        self.inserted_steps = 0
        self.sampled_steps = 0
        self.drawable_steps = 0
        self.full = False
        self.offset = 0.0  # samples forgiven (below 0) or granted (above 0) so far

    @property
    def ahead(self) -> float:
        """Samples that inserts have paid for and nobody has drawn yet; below 0 the learner is ahead."""
        return (
            (self.inserted_steps - self.min_steps) * self.samples_per_insert
            - self.sampled_steps
            + self.offset
        )

    @property
    def waiting_samples(self) -> float:
        """What of `ahead` may not be drawn yet: the steps of an interval that is not full."""
        return (self._paying_steps % self.interval_steps) * self.samples_per_insert

    @property
    def due_samples(self) -> float:
        """All samples that are paid for since the beginning, for a schedule that nobody may run ahead of."""
        if not self.filled:
            return 0.0
        return (self._paying_steps - self._paying_steps % self.interval_steps) * self.samples_per_insert

    @property
    def _paying_steps(self) -> int:
        return max(0, self.inserted_steps - self.min_steps)

    @property
    def filled(self) -> bool:
        # Short segments leave part of their slots empty: a ring can be full with fewer than min_steps in it,
        # and then waiting for more would never end.
        return self.drawable_steps >= self.min_steps or (self.full and self.drawable_steps > 0)

    def can_sample(self, batch_size: int) -> bool:
        # While inserts are held a draw is always allowed, even one larger than both tolerances together:
        # so at any moment at least one side can go on.
        if not self.filled:
            return False
        ahead = self.ahead
        if ahead > self.tolerance_samples:
            return True
        return ahead - self.waiting_samples - batch_size >= -self._learner_tolerance

    @property
    def _learner_tolerance(self) -> float:
        # A learner that may run ahead of its interval would smear the bursts.
        return self.tolerance_samples if self.interval_steps == 1 else 0.0

    def inserts_ahead(self) -> bool:
        """Whether acknowledgements should be held back."""
        return self.filled and self.ahead > self.tolerance_samples

    def reason(self, batch_size: int = 1) -> str:
        """Who waits for what, for people; empty when nobody has to wait."""
        if not self.filled:
            return f"{self.min_steps - self.drawable_steps:,} more steps wanted before batches flow"
        if self.inserts_ahead():
            return f"actors are {round(self.ahead):,} samples ahead of the learner"
        if not self.can_sample(batch_size):
            if self.interval_steps > 1:
                missing = self.interval_steps - self._paying_steps % self.interval_steps
                return f"{missing:,} more steps wanted: batches come every {self.interval_steps:,} steps"
            return f"the learner is {round(batch_size - self.ahead):,} samples ahead of the actors"
        return ""

    def forgive(self) -> None:
        """Writes off what nobody was there to draw, so that a returning learner does not stop the actors."""
        self.offset -= max(0.0, self.ahead - self.tolerance_samples)

    def rebase(self) -> None:
        """Starts the balance anew: the past was paced by another ratio and says nothing about this one."""
        missing = max(0, self.min_steps - self.inserted_steps)
        self.offset -= self.ahead + missing * self.samples_per_insert

    def adjust(
        self,
        *,
        min_steps: int | None = None,
        samples_per_insert: float | None = None,
        tolerance_samples: float | None = None,
    ) -> None:
        """New settings while running."""
        if tolerance_samples is not None:
            self.tolerance_samples = tolerance_samples
        if min_steps is None and samples_per_insert is None:
            return
        self.min_steps = self.min_steps if min_steps is None else min_steps
        self.samples_per_insert = (
            self.samples_per_insert if samples_per_insert is None else samples_per_insert
        )
        self.rebase()


def check_limiter_values(values: Mapping[str, float], capacity_steps: int) -> None:
    """Refuses settings that do not exist or could never work, in words."""
    known = ("samples_per_insert", "min_steps")
    if unknown := sorted(set(values) - set(known)):
        raise Refused(
            "unknown_value", f"replay has no setting {', '.join(unknown)}; it has {' and '.join(known)}"
        )
    if not values:
        raise Refused("unknown_value", f"nothing to set; replay has {' and '.join(known)}")
    ratio = values.get("samples_per_insert", 1.0)
    if not 0.0 < ratio <= MAX_SAMPLES_PER_INSERT:
        raise Refused(
            "bad_value",
            f"samples_per_insert {ratio:g}: it must be a number above 0, at most {MAX_SAMPLES_PER_INSERT:g}",
        )
    steps = values.get("min_steps", 1.0)
    if not (math.isfinite(steps) and steps == int(steps) and 1 <= steps <= capacity_steps):
        raise Refused(
            "bad_value",
            f"min_steps {steps:g}: it must be a whole number from 1 to replay.capacity_steps "
            f"({capacity_steps}); with more nothing could ever be drawn",
        )
