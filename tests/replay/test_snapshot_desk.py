"""Orders of snapshots: who waits, who is refused, who is answered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from replay_episodes import AGENT, Episode, Sender, fill, make_buffer, make_spec

from services.replay.snapshot_desk import SnapshotDesk
from shared.codec import Received
from shared.errors import Refused
from shared.links.requests import Incoming
from shared.messages import Message, SnapshotOrder, SnapshotTaken

SPEC = make_spec()


class Outbox:
    """Stands for the link: what was answered to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def reply(self, peer: bytes, message: Message) -> None:
        self.sent.append((peer, message))

    def refuse(self, peer: bytes, _message: Message, error: Refused) -> None:
        self.sent.append((peer, error.code))


@pytest.fixture
def desk(tmp_path: Path) -> SnapshotDesk:
    buffer = make_buffer(tmp_path / AGENT, SPEC)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 1000, 9, "terminated")])
    made = SnapshotDesk(tmp_path, 0, {AGENT: buffer}, lambda: None)
    made.requests = Outbox()  # type: ignore[assignment]
    return made


def order(desk: SnapshotDesk, number: int, peer: bytes = b"a", request: int = 1) -> None:
    message = SnapshotOrder(number=number, request=request, deadline_s=100.0)
    desk.on_snapshot_order(message, Incoming(peer, Received(message, {})))


def sent(desk: SnapshotDesk) -> list[tuple[bytes, Any]]:
    return desk.requests.sent  # type: ignore[attr-defined]


def finish(desk: SnapshotDesk) -> None:
    deadline = time.monotonic() + 10.0
    while desk._snapshot is not None and time.monotonic() < deadline:
        desk.advance()
    assert desk._snapshot is None


def test_order_with_a_number_far_above_all_others_is_refused(desk: SnapshotDesk) -> None:
    """Numbers only rise: taken under the highest there can be, it would be the last snapshot ever."""
    with pytest.raises(Refused, match="the newest is 0"):
        order(desk, 2**31 - 1)
    order(desk, 3)  # another replay service may have had two more
    finish(desk)
    assert desk.newest() == 3


def test_order_is_answered_once_to_everybody_who_waits(desk: SnapshotDesk) -> None:
    """A repeat waits with the first, somebody else gets an answer of his own."""
    order(desk, 4)
    order(desk, 4)
    order(desk, 4, b"b", 7)
    assert sent(desk) == []
    finish(desk)
    assert [(peer, answer.request) for peer, answer in sent(desk)] == [(b"a", 1), (b"b", 7)]
    assert all(isinstance(answer, SnapshotTaken) and answer.steps == {AGENT: 9} for _, answer in sent(desk))


def test_order_of_another_number_meanwhile_is_refused(desk: SnapshotDesk) -> None:
    """One snapshot at a time."""
    order(desk, 4)
    with pytest.raises(Refused, match="snapshot 4 is being taken"):
        order(desk, 5)
    finish(desk)
    order(desk, 5)
    finish(desk)
    assert [answer.number for _, answer in sent(desk)] == [4, 5]


def test_order_past_its_deadline_is_refused_and_the_snapshot_goes_on(desk: SnapshotDesk) -> None:
    """Whoever asks again gets what was finished meanwhile."""
    order(desk, 4)
    desk.expire_orders(time.monotonic() + 50.0)
    assert sent(desk) == []
    desk.expire_orders(time.monotonic() + 95.0)
    assert sent(desk) == [(b"a", "deadline")]
    finish(desk)
    order(desk, 4, request=2)
    assert [getattr(answer, "number", answer) for _, answer in sent(desk)] == ["deadline", 4]


def test_order_while_the_service_ends_is_refused_and_can_be_repeated(
    desk: SnapshotDesk, tmp_path: Path
) -> None:
    """The next life takes the snapshot under the same number."""
    order(desk, 4)
    desk.end()
    assert sent(desk) == [(b"a", "snapshot_unfinished")]
    order(desk, 4)
    finish(desk)
    assert (tmp_path / "snapshots" / "4" / AGENT / "manifest.json").exists()
