"""Which rounds of a run in lockstep may be played, and when the run is over. Pure arithmetic over versions.

A round may be played once every learning agent has the version that the schedule wants for it. When the run
is to end, no round is begun that nobody has begun; those that were begun are played, stored and trained on,
so that a run always stops between two rounds.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.schedule import Schedule, phases_done, version_after


class RoundGate:
    """`versions` is always the newest version of every learning agent (0: none yet)."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._begun = -1  # the last round that somebody may play
        self._last: int | None = None if schedule.rounds is None else schedule.rounds - 1

    def first_round(self, versions: Mapping[str, int]) -> int:
        """Where actors begin: the first round that nobody has trained on."""
        return min(phases_done(version) for version in versions.values())

    def may_play(self, number: int, versions: Mapping[str, int]) -> bool:
        """Whether a round may be played now; if so it counts as begun."""
        wanted = self._schedule.version_for(number)
        if self.is_past(number) or not all(version >= wanted for version in versions.values()):
            return False
        self._begun = max(self._begun, number)
        return True

    def is_past(self, number: int) -> bool:
        """Whether the run ends before this round."""
        return self._last is not None and number > self._last

    def stop(self) -> bool:
        """No round after those that were begun; whether that is news."""
        last = self._begun if self._last is None else min(self._last, self._begun)
        changed, self._last = last != self._last, last
        return changed

    def is_over(self, versions: Mapping[str, int]) -> bool:
        """Whether every round was trained on."""
        if self._last is None or not versions:  # nobody has said yet who plays
            return False
        return all(version >= version_after(self._last) for version in versions.values())
