from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.actor.outbox import GO_BACK_PAUSE_S, Outbox
from shared.errors import BrokenInvariant
from shared.messages import Mark, Segment
from shared.segment_frame import SegmentFrame, frame_of

AGENT = "agent_0"


def segment(sequence: int, agent: str = AGENT) -> SegmentFrame:
    head = Segment(
        incarnation="0" * 32,
        agent=agent,
        sequence=sequence,
        produced_steps=sequence,
        actor_index=0,
        slot=0,
        epoch=0,
        before=0,
        owned=1,
        rows=2,
        checksum=0,
    )
    return frame_of(head, {})


class Link:
    """Takes up to `room` segments and remembers their numbers."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.sent: list[int] = []

    def send(self, message: SegmentFrame) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.sent.append(message.head.sequence)
        return True


def filled(count: int, window: int = 100, sent: bool = True) -> tuple[Outbox, Link]:
    outbox, link = Outbox([AGENT], window), Link()
    for number in range(1, count + 1):
        outbox.add(segment(number))
    if sent:
        outbox.pump(AGENT, link.send)
    return outbox, link


def stored(number: int, gap: bool = False) -> Mark:
    return Mark(stored=number, acknowledged=number, gap=gap)


class LossyChannel(RuleBasedStateMachine):
    """An outbox, a channel that loses and overtakes, and a replay that takes only the next number."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 5
        self.outbox = Outbox([AGENT], self.window)
        self.channel: list[int] = []
        self.replay: list[int] = []
        self.acknowledged = 0
        self.marks: list[tuple[Mark, bool]] = []
        self.now = 0.0

    def send(self, message: SegmentFrame) -> bool:
        if len(self.channel) >= 4:
            return False
        self.channel.append(message.head.sequence)
        return True

    @precondition(lambda self: not self.outbox.full)
    @rule(count=st.integers(1, 3))
    def produce(self, count: int) -> None:
        for _ in range(count):
            if not self.outbox.full:
                self.outbox.add(segment(self.outbox.next_sequence(AGENT)))

    @rule()
    def pump(self) -> None:
        self.outbox.pump(AGENT, self.send)

    @precondition(lambda self: self.channel)
    @rule(place=st.integers(0, 3))
    def deliver(self, place: int) -> None:
        """Any message of the channel arrives next, so they overtake one another."""
        number = self.channel.pop(place % len(self.channel))
        if number == len(self.replay) + 1:
            self.replay.append(number)
        elif number > len(self.replay):
            self.marks.append(
                (Mark(stored=len(self.replay), acknowledged=self.acknowledged, gap=True), False)
            )

    @precondition(lambda self: self.channel)
    @rule(place=st.integers(0, 3))
    def lose(self, place: int) -> None:
        self.channel.pop(place % len(self.channel))

    @rule()
    def restart_replay(self) -> None:
        """What was on its way is gone, in both directions; what was stored is not."""
        self.channel.clear()
        self.marks.clear()
        self.acknowledged = 0

    @rule(held_back=st.integers(0, 3), reported=st.booleans())
    def answer(self, held_back: int, reported: bool) -> None:
        """The limiter may hold acknowledgements back."""
        self.acknowledged = max(self.acknowledged, len(self.replay) - held_back)
        self.marks.append((Mark(stored=len(self.replay), acknowledged=self.acknowledged), reported))

    @precondition(lambda self: self.marks)
    @rule(lost=st.booleans())
    def hear(self, lost: bool) -> None:
        mark, reported = self.marks.pop(0)
        if not lost:
            self.outbox.on_mark(AGENT, mark, self.now, reported)

    @rule(elapsed_s=st.sampled_from([0.1, 1.0]))
    def wait(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @invariant()
    def window_holds_what_is_not_stored(self) -> None:
        """Nothing is dropped before replay has it, and the window stays within its bound."""
        missing = self.outbox.next_sequence(AGENT) - 1 - len(self.replay)
        assert missing <= self.outbox.unacknowledged_segments <= self.window

    @invariant()
    def replay_has_each_number_once_and_in_order(self) -> None:
        assert self.replay == list(range(1, len(self.replay) + 1))

    def teardown(self) -> None:
        """With a channel that works again, everything arrives."""
        for _ in range(20):
            self.outbox.pump(AGENT, self.send)
            while self.channel:
                self.deliver(0)
            self.answer(0, reported=True)
            while self.marks:
                self.hear(lost=False)
            self.now += 1.0
        assert self.outbox.all_stored
        assert self.outbox.unacknowledged_segments == 0
        assert len(self.replay) == self.outbox.next_sequence(AGENT) - 1


LossyChannel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLossyChannel = LossyChannel.TestCase


def test_segments_are_sent_in_order_and_once() -> None:
    """Without trouble nothing is sent twice, however often the outbox is pumped."""
    outbox, link = filled(3)
    outbox.add(segment(4))
    assert outbox.unsent
    assert outbox.pump(AGENT, link.send)
    assert outbox.pump(AGENT, link.send)
    assert link.sent == [1, 2, 3, 4]
    assert not outbox.unsent
    assert outbox.resent_segments == 0


def test_segment_out_of_turn_is_refused() -> None:
    """A stream's numbers have no gaps."""
    outbox, _link = filled(1)
    with pytest.raises(ValueError, match="expected 2"):
        outbox.add(segment(3))


def test_link_that_is_full_is_taken_up_where_it_stopped() -> None:
    """What the link did not take is sent first when it has room again."""
    outbox, _link = filled(3, sent=False)
    link = Link(room=2)
    assert not outbox.pump(AGENT, link.send)
    link.room = 5
    assert outbox.pump(AGENT, link.send)
    assert link.sent == [1, 2, 3]


def test_window_that_is_full_names_its_agent_until_something_is_acknowledged() -> None:
    """Only acknowledgements make room; that something is stored is not enough."""
    outbox = Outbox(["a", "b"], 2)
    for number in (1, 2):
        outbox.add(segment(number, "b"))
    outbox.pump("b", Link().send)
    assert outbox.full == ["b"]
    outbox.on_mark("b", Mark(stored=2, acknowledged=0), 0.0, reported=False)
    assert outbox.full == ["b"]
    outbox.on_mark("b", Mark(stored=2, acknowledged=1), 0.0, reported=False)
    assert outbox.full == []


def test_stored_segments_are_all_stored_before_they_are_acknowledged() -> None:
    """An actor may leave once replay has everything, even while the limiter holds back."""
    outbox, _link = filled(3)
    assert not outbox.all_stored
    outbox.on_mark(AGENT, Mark(stored=3, acknowledged=1), 0.0, reported=False)
    assert outbox.all_stored
    assert outbox.unacknowledged_segments == 2


def test_gap_sends_again_from_the_first_missing_and_not_twice_at_once() -> None:
    """One gap makes many marks; going back for each would flood the link."""
    outbox, link = filled(5)
    for _ in range(3):
        outbox.on_mark(AGENT, stored(2, gap=True), 0.0, reported=False)
        outbox.pump(AGENT, link.send)
    assert link.sent == [1, 2, 3, 4, 5, 3, 4, 5]
    assert outbox.resent_segments == 3
    outbox.on_mark(AGENT, stored(2, gap=True), GO_BACK_PAUSE_S * 1.1, reported=False)
    outbox.pump(AGENT, link.send)
    assert link.sent[8:] == [3, 4, 5]


def test_report_without_progress_since_the_last_one_sends_again() -> None:
    """The tail of a stream that was lost makes no gap; two equal reports show it."""
    outbox, link = filled(3)
    outbox.on_mark(AGENT, stored(1), 0.0, reported=True)
    outbox.pump(AGENT, link.send)
    assert link.sent == [1, 2, 3]
    outbox.on_mark(AGENT, stored(1), 1.0, reported=True)
    outbox.pump(AGENT, link.send)
    assert link.sent == [1, 2, 3, 2, 3]


def test_report_with_everything_stored_sends_nothing() -> None:
    """An actor that waits does not repeat itself."""
    outbox, link = filled(3)
    for now in range(5):
        outbox.on_mark(AGENT, stored(3), float(now), reported=True)
        outbox.pump(AGENT, link.send)
    assert link.sent == [1, 2, 3]


@pytest.mark.parametrize(
    "mark",
    [
        stored(4),
        Mark(stored=2**62, acknowledged=2**62, gap=True),
        Mark(stored=1, acknowledged=3),
        Mark(stored=0, acknowledged=2**62, gap=True),
    ],
)
def test_mark_that_cannot_be_is_ignored(mark: Mark) -> None:
    """Replay cannot have what was never sent, nor acknowledge what it has not stored."""
    outbox, link = filled(3)
    for now in (0.0, 1.0, 2.0):
        outbox.on_mark(AGENT, mark, now, reported=True)
        outbox.pump(AGENT, link.send)
    assert outbox.unacknowledged_segments == 3
    assert not outbox.all_stored
    assert set(link.sent) == {1, 2, 3}


def test_mark_of_an_unknown_agent_is_ignored() -> None:
    """Marks for streams that are not ours change nothing."""
    outbox, _link = filled(1)
    outbox.on_mark("stranger", stored(1), 0.0, reported=True)
    assert outbox.unacknowledged_segments == 1


@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_mark_behind_what_was_acknowledged_breaks_the_stream(waiting: int) -> None:
    """A replay that lost acknowledged segments cannot get them again: twice said, the actor ends."""
    outbox, link = filled(4)
    outbox.on_mark(AGENT, stored(4), 0.0, reported=True)
    for number in range(5, 5 + waiting):
        outbox.add(segment(number))
    outbox.pump(AGENT, link.send)
    outbox.on_mark(AGENT, stored(1), 1.0, reported=True)
    with pytest.raises(BrokenInvariant, match="lost"):
        outbox.on_mark(AGENT, stored(1), 2.0, reported=True)
