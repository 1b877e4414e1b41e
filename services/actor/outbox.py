"""What an actor has played and replay has not acknowledged: a bounded window for each of its streams.

Every segment gets the next number of its stream and stays here until replay has acknowledged it. When replay
says that it has less than was sent (it died, or something overtook), sending goes back to the first segment
it does not have. When a window is full the actor waits; nothing is ever dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from shared.errors import BrokenInvariant
from shared.messages import Mark
from shared.segment_frame import SegmentFrame

Send = Callable[[SegmentFrame], bool]
GO_BACK_PAUSE_S = 0.5  # what was sent again needs a moment to arrive before it counts as missing once more


@dataclass(slots=True)
class _Stream:
    window: deque[SegmentFrame] = field(default_factory=deque)
    next_sequence: int = 1  # the number that the next new segment gets
    cursor: int = 1  # the number that is sent next
    stored: int = 0
    missing_at_last_report: int = -1  # `stored` then, if something sent was missing; else -1
    went_back: float = -1e9


class Outbox:
    """The windows of all streams of one actor incarnation."""

    def __init__(self, agents: list[str], window_segments: int) -> None:
        self._window_segments = window_segments
        self._streams = {agent: _Stream() for agent in agents}
        self.resent_segments = 0

    def next_sequence(self, agent: str) -> int:
        return self._streams[agent].next_sequence

    def add(self, segment: SegmentFrame) -> None:
        """Takes a new segment, whose sequence must be the stream's next."""
        agent, sequence = segment.head.agent, segment.head.sequence
        stream = self._streams[agent]
        if sequence != stream.next_sequence:
            raise ValueError(f"segment {sequence} of {agent}; expected {stream.next_sequence}")
        stream.window.append(segment)
        stream.next_sequence += 1

    @property
    def full(self) -> list[str]:
        """The agents whose windows are full: the actor waits for their acknowledgements."""
        return [
            agent for agent, stream in self._streams.items() if len(stream.window) >= self._window_segments
        ]

    @property
    def unsent(self) -> bool:
        return any(stream.cursor < stream.next_sequence for stream in self._streams.values())

    @property
    def all_stored(self) -> bool:
        return all(stream.stored == stream.next_sequence - 1 for stream in self._streams.values())

    @property
    def unacknowledged_segments(self) -> int:
        return sum(len(stream.window) for stream in self._streams.values())

    def pump(self, agent: str, send: Send) -> bool:
        """Sends what has not been sent, in order. False: the link is full, try again later."""
        stream = self._streams[agent]
        if stream.cursor == stream.next_sequence:
            return True
        first_kept = stream.window[0].head.sequence
        for segment in list(islice(stream.window, stream.cursor - first_kept, None)):
            if not send(segment):
                return False
            stream.cursor += 1
        return True

    def on_mark(self, agent: str, mark: Mark, now: float, reported: bool) -> None:
        """Takes replay's word on how far it is; `reported` marks the answer to a regular report."""
        stream = self._streams.get(agent)
        if stream is None or not mark.acknowledged <= mark.stored < stream.next_sequence:
            return  # not ours, or nonsense: replay cannot have what was never sent
        stream.stored = max(stream.stored, mark.stored)
        while stream.window and stream.window[0].head.sequence <= mark.acknowledged:
            stream.window.popleft()
        first_kept = stream.window[0].head.sequence if stream.window else stream.next_sequence
        stream.cursor = max(stream.cursor, first_kept)
        # Missing in one report is on its way, a report overtakes segments; missing in two in a row is lost.
        arrived = mark.stored + mark.held
        stuck = reported and arrived == stream.missing_at_last_report
        if reported:
            stream.missing_at_last_report = arrived if stream.cursor > arrived + 1 else -1
        if stuck and mark.stored + 1 < first_kept:
            raise BrokenInvariant(
                f"replay has {agent} up to segment {mark.stored} and had acknowledged {first_kept - 1}: it "
                "lost its files; this actor's streams cannot go on, a new one's can"
            )
        missing = stream.cursor > arrived + 1
        if (mark.gap or stuck) and missing and now - stream.went_back > GO_BACK_PAUSE_S:
            self._go_back(stream, max(arrived + 1, first_kept), now)

    def _go_back(self, stream: _Stream, sequence: int, now: float) -> None:
        self.resent_segments += stream.cursor - sequence
        stream.cursor = sequence
        stream.went_back = now
