"""What actors are told of their streams: how far they are stored, how far acknowledged, where a gap is.

Marks are cumulative, so many segments need one message; while segments keep coming it is put off for a few
milliseconds. Where actors are held back, what is stored goes unacknowledged until they may go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from services.replay.desk import AgentDesk
from shared.links.requests import RequestReceiver
from shared.messages import Mark, StreamMarks

PUT_OFF_S = 0.005  # hearing of some segments costs an actor as much as sending one
GAP_PAUSE_S = 0.2  # a stream with a gap is told so at most this often


class Acknowledgements:
    """Of all streams that end here. `holds_back` says whether an agent's actors must wait now."""

    requests: RequestReceiver  # set once its link is open

    def __init__(
        self, desks: Mapping[str, AgentDesk], holds_back: Callable[[str, AgentDesk, float], bool]
    ) -> None:
        self._desks, self._holds_back = desks, holds_back
        self._acknowledged: dict[tuple[str, str], int] = {}  # (incarnation, agent): the last number
        self._moved: dict[str, set[str]] = {}  # incarnation: agents whose marks moved
        self._sent_at = 0.0
        self._gap_told: dict[tuple[str, str], float] = {}

    def note(self, incarnation: str, agent: str) -> None:
        """Something of this stream was stored, or came a second time."""
        self._moved.setdefault(incarnation, set()).add(agent)

    def tell_gap(self, incarnation: str, agent: str) -> None:
        """Asks for what is missing before it, but not for each of many segments behind one gap."""
        now = time.monotonic()
        if now - self._gap_told.get((incarnation, agent), -1e9) < GAP_PAUSE_S:
            return
        self._gap_told[incarnation, agent] = now
        mark = self._mark(incarnation, agent).model_copy(update={"gap": True})
        self.requests.reply(incarnation.encode(), StreamMarks(incarnation=incarnation, marks={agent: mark}))

    def advance(self, more_comes: bool) -> bool:
        """Sends what is due; True when that is put off because segments keep coming."""
        if not self._moved:
            return False
        if more_comes and time.monotonic() - self._sent_at < PUT_OFF_S:
            return True
        self.send()
        return False

    def send(self) -> None:
        """One message for each actor whose streams moved; its socket's identity is its incarnation."""
        moved, self._moved = self._moved, {}
        for incarnation, agents in moved.items():
            self.requests.reply(incarnation.encode(), self.marks(incarnation, agents))
        self._sent_at = time.monotonic()

    def marks(self, incarnation: str, agents: set[str], request: int = 0) -> StreamMarks:
        """How far these agents' streams are; acknowledges them unless their actors are held back."""
        now = time.monotonic()
        marks, reasons = {}, []
        for agent in agents:
            desk = self._desks[agent]
            if self._holds_back(agent, desk, now):
                desk.withheld.add(incarnation)
                reasons.append(f"{agent}: {desk.buffer.limiter.reason()}")
            else:
                self._acknowledged[incarnation, agent] = desk.buffer.mark(incarnation)
            marks[agent] = self._mark(incarnation, agent)
        return StreamMarks(
            request=request, incarnation=incarnation, marks=marks, waiting_for="; ".join(reasons)[:2_000]
        )

    def release(self, agent: str) -> None:
        """Its actors may go on."""
        withheld = self._desks[agent].withheld
        for incarnation in withheld:
            self.note(incarnation, agent)
        withheld.clear()

    def forget_gaps(self, now: float) -> None:
        """Those that may be told again."""
        self._gap_told = {key: told for key, told in self._gap_told.items() if now - told < GAP_PAUSE_S}

    def _mark(self, incarnation: str, agent: str) -> Mark:
        desk = self._desks[agent]
        acknowledged = self._acknowledged.get((incarnation, agent), 0)
        held = desk.rounds.held(incarnation) if desk.rounds is not None else 0
        return Mark(stored=desk.buffer.mark(incarnation), acknowledged=acknowledged, held=held)
