"""The right to train now, where only some agents may at the same time (`parallel.num_workers`).

Asked of the parameter server and given back after a slice of time, or after a phase of a run in rounds, so
that everybody comes to it. Without such a limit there is nothing to ask.
"""

from __future__ import annotations

import time

from shared.codec import Received
from shared.errors import RookeryError, StaleToken
from shared.links.requests import RequestSender
from shared.messages import PermitRequest, PermitReturn, Token

SLICE_S = 0.25
REFUSED_PAUSE_S = 0.2  # at once would be refused at once again


class Permit:
    """One learner's permit."""

    def __init__(self, params: RequestSender, token: Token, *, limited: bool) -> None:
        self._params, self._token, self._limited = params, token, limited
        self._asking = False
        self._refused_at = -1e9
        self._since: float | None = None  # when it was given to us

    def obtain(self) -> bool:
        """Whether training may go on; asks if it may not."""
        if not self._limited or self._since is not None:
            return True
        if not self._asking and time.monotonic() - self._refused_at > REFUSED_PAUSE_S:
            self._asking = True
            self._params.ask(
                PermitRequest(token=self._token), on_reply=self._on_permit, on_failure=self._on_no_permit
            )
        return False

    @property
    def due(self) -> bool:
        """Whether it was held for a slice of time, so that others come to it now."""
        return self._since is not None and time.monotonic() - self._since >= SLICE_S

    def give_back(self) -> None:
        if self._since is not None:
            self._since = None
            self._params.tell(PermitReturn(token=self._token))

    def _on_permit(self, _received: Received) -> None:
        self._asking, self._since = False, time.monotonic()

    def _on_no_permit(self, error: RookeryError) -> None:
        self._asking, self._refused_at = False, time.monotonic()
        if isinstance(error, StaleToken):
            raise error
