"""A learner's place in the schedule of a run in rounds: which phase it is in, and how far it may draw.

Phase r begins when replay has stored round r and says how many draws are due, and ends when version r + 2 is
published. Nothing is drawn ahead of it. Owns two counters and what is asked of replay; the service trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.codec import Received
from shared.errors import Refused, RookeryError, StaleToken
from shared.links.requests import RequestSender
from shared.logs import get_logger
from shared.messages import PhaseGrant, PhaseRequest, Token, expect

log = get_logger()

PHASE_TIMEOUT_S = 30.0  # a round may take long to be played; asking again costs nothing
REFUSED_PAUSE_S = 0.2  # at once would be refused at once again


def lost_its_place(error: RookeryError) -> bool:
    """Whether replay is elsewhere in the schedule: asking again would be refused again, for ever."""
    return isinstance(error, Refused) and error.code == "out_of_order"


class LearnerRounds:
    """`number` is the phase that is being trained, or waited for while `due_draws` has all been trained."""

    def __init__(self, replay: RequestSender, token: Token, publish: Callable[[], None]) -> None:
        self._replay, self._token, self._publish = replay, token, publish
        self.number = 0
        self.trained = 0  # draws
        self.due_draws = 0
        self._asking = self._granted = False
        self._refused_at = -1e9

    def resume(self, number: int, trained: int) -> None:
        """Goes on between two phases."""
        self.number, self.trained, self.due_draws = number, trained, trained

    @property
    def at_boundary(self) -> bool:
        """Between two phases: the last one is published, the next one has not begun."""
        return not self._granted

    def ask(self) -> None:
        """Asks for the phase that comes, once."""
        if self._asking or self._granted or time.monotonic() - self._refused_at < REFUSED_PAUSE_S:
            return
        self._asking = True
        self._replay.ask(
            PhaseRequest(token=self._token, round=self.number),
            on_reply=self._on_grant,
            on_failure=self._on_no_grant,
            timeout_s=PHASE_TIMEOUT_S,
        )

    def _on_grant(self, received: Received) -> None:
        grant = expect(received.message, PhaseGrant)
        self._asking, self._granted = False, True
        self.due_draws = grant.draws
        self._end_if_trained()

    def _on_no_grant(self, error: RookeryError) -> None:
        self._asking, self._refused_at = False, time.monotonic()
        if isinstance(error, StaleToken) or lost_its_place(error):
            raise error
        log.info("waiting", waiting_for=f"round {self.number} to be stored", reason=str(error))

    def on_trained(self) -> None:
        """One more draw was trained on, or skipped."""
        self.trained += 1
        self._end_if_trained()

    def _end_if_trained(self) -> None:
        if self._granted and self.trained == self.due_draws:
            self._publish()

    def on_published(self) -> None:
        """The phase is over."""
        self._granted = False
        self.number += 1
