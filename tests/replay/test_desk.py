"""An agent's desk: whose requests wait, whose are answered, and what a malformed or forged one can do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_episodes import AGENT, Episode, Sender, fill, make_buffer, make_spec
from round_play import BATCH, Learner, Player, make_rounds

from services.replay.desk import AgentDesk
from shared.codec import Received
from shared.errors import BadMessage, SpecMismatch, StaleToken
from shared.links.trays import TrayTable
from shared.messages import PhaseRequest, PriorityUpdate, SampleRequest, Token

SPEC = make_spec()
HOLDER, STRANGER = b"holder", b"stranger"

Update = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def desk(tmp_path: Path) -> AgentDesk:
    buffer = make_buffer(tmp_path / AGENT, SPEC)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 1000 * n, 10, "terminated") for n in range(4)])
    return AgentDesk(buffer, TrayTable(1 << 20))


def token(number: int) -> Token:
    return Token(agent=AGENT, number=number)


def ask(desk: AgentDesk, peer: bytes, number: int, draw: int, arrays: Update | None = None) -> None:
    message = SampleRequest(token=token(number), draw=draw, batch_size=4, beta=0.5, request=draw + 1)
    desk.hold_sample(peer, Received(message, arrays or {}), message)


def served(desk: AgentDesk) -> list[tuple[bytes, int]]:
    """Who gets which draws now."""
    answered = []
    while (sample := desk.next_sample()) is not None:
        desk.draw(sample)
        answered.append((sample.peer, sample.message.draw))
    return answered


def update(**changes: Any) -> Update:
    arrays = {
        "index": np.zeros(2, np.int64),
        "generation": np.ones(2, np.uint64),
        "priority": np.ones(2, np.float32),
    }
    return arrays | changes


# --- whose lease it is ------------------------------------------------------------------------------------


def test_request_before_the_notice_of_its_lease_waits_for_it(desk: AgentDesk) -> None:
    """A grant can be faster than its notice: nothing is served on a number that nobody has confirmed."""
    desk.note_lease(1, b"the one before")
    ask(desk, HOLDER, 2, draw=0)
    assert served(desk) == []
    assert desk.note_lease(2, HOLDER) == []
    assert served(desk) == [(HOLDER, 0)]


def test_stranger_with_a_number_that_is_not_granted_yet_gets_nothing_and_stops_nobody(
    desk: AgentDesk,
) -> None:
    """Neither a batch, nor the place of the one who holds the lease, nor the number itself."""
    desk.note_lease(1, HOLDER)
    for number in (2, 5):
        ask(desk, STRANGER, number, draw=0)
    ask(desk, HOLDER, 1, draw=0)
    assert served(desk) == [(HOLDER, 0)]
    ask(desk, HOLDER, 1, draw=1)
    assert served(desk) == [(HOLDER, 1)]

    ask(desk, HOLDER, 2, draw=2)  # the lease is granted again, and asked with before the notice
    refused = desk.note_lease(2, HOLDER)
    assert [(held.peer, error.code) for held, error in refused] == [(STRANGER, "wrong_agent")]
    assert served(desk) == [(HOLDER, 2)]
    assert [held.message.token.number for held in desk.held.values()] == [5]


def test_old_lease_is_stale_once_a_newer_one_is_known_and_stands_before_nobody(desk: AgentDesk) -> None:
    """A learner that slept through its lease is told so; what it asked for does not hold up the next one."""
    desk.note_lease(1, b"sleeper")
    for draw in range(4):
        desk.buffer.draw(draw, 64, 0.5)  # of 288 samples that are paid for
    huge = SampleRequest(token=token(1), draw=0, batch_size=65_536, beta=0.5, request=1, deadline_s=86_400.0)
    desk.hold_sample(b"sleeper", Received(huge, {}), huge)
    assert served(desk) == []  # more than the limiter allows for a long time
    ask(desk, HOLDER, 2, draw=0)
    (refused,) = desk.note_lease(2, HOLDER)
    assert refused[0].peer == b"sleeper"
    assert isinstance(refused[1], StaleToken)
    assert served(desk) == [(HOLDER, 0)]


def test_claim_of_a_number_that_two_grants_passed_by_stands_before_nobody(desk: AgentDesk) -> None:
    """Notices may be lost: the next one settles all claims up to its number."""
    desk.note_lease(1, b"the one before")
    ask(desk, STRANGER, 2, draw=10**6)
    ask(desk, HOLDER, 3, draw=0)
    assert [error.code for _held, error in desk.note_lease(3, HOLDER)] == ["stale_token"]
    assert served(desk) == [(HOLDER, 0)]


def test_lease_that_was_given_back_leaves_its_requests_to_their_deadline(desk: AgentDesk) -> None:
    """At the end of a run nobody has done anything wrong."""
    desk.note_lease(1, HOLDER)
    ask(desk, HOLDER, 1, draw=0)
    assert desk.note_lease(1, b"") == []


def test_request_that_waits_for_its_notice_is_no_sign_of_a_shortage(desk: AgentDesk) -> None:
    """Statistics say who waits for steps, and since when; this one waits for something else."""
    desk.note_lease(0, b"")
    ask(desk, HOLDER, 1, draw=0)
    assert desk.unproven == 1
    assert desk.stats(time.monotonic()).limiter.blocked == ""


def test_without_any_notice_every_number_may_be_the_newest(desk: AgentDesk) -> None:
    """A restarted replay serves at once, also while the parameter server is away."""
    ask(desk, HOLDER, 7, draw=0)
    assert served(desk) == [(HOLDER, 0)]


def test_learner_in_rounds_that_claims_a_lease_of_others_waits_no_longer_once_that_is_known(
    tmp_path: Path,
) -> None:
    """The same for who waits for a round."""
    rounds = make_rounds(tmp_path)
    desk = AgentDesk(rounds.buffer, TrayTable(1 << 20), rounds)
    desk.note_lease(1, b"the one before")
    for peer in (HOLDER, STRANGER, HOLDER):  # everybody counts his own requests, and this one comes again
        desk.hold_phase(peer, PhaseRequest(token=token(2), round=0, request=1))
    assert len(desk.phases) == 2
    assert [held.peer for held, _error in desk.note_lease(2, HOLDER)] == [STRANGER]
    assert [held.peer for held in desk.phases] == [HOLDER]


# --- deadlines and repeats --------------------------------------------------------------------------------


def test_repeated_request_waits_once_and_counts_once(desk: AgentDesk) -> None:
    """Before it is served and after."""
    desk.note_lease(1, HOLDER)
    ask(desk, HOLDER, 1, draw=0)
    ask(desk, HOLDER, 1, draw=0)
    assert served(desk) == [(HOLDER, 0)]
    assert desk.buffer.sampled_steps == 4
    ask(desk, HOLDER, 1, draw=0)
    assert served(desk) == [(HOLDER, 0)]
    assert desk.buffer.sampled_steps == 4


def test_request_past_its_deadline_waits_no_longer(desk: AgentDesk) -> None:
    """It is handed out once, to be refused."""
    ask(desk, HOLDER, 1, draw=0)
    assert desk.take_overdue(time.monotonic()) == []
    (overdue,) = desk.take_overdue(time.monotonic() + 1e6)
    assert overdue.peer == HOLDER
    assert served(desk) == []


# --- malformed updates ------------------------------------------------------------------------------------

MALFORMED = {
    "numbers that are no arrays": update(
        index=np.array(0, np.int64), generation=np.array(1, np.uint64), priority=np.array(1, np.float32)
    ),
    "another type": update(index=np.zeros(2, np.int32)),
    "another length": update(priority=np.ones(3, np.float32)),
    "two dimensions": update(generation=np.ones((2, 1), np.uint64)),
    "a name too few": {"index": np.zeros(2, np.int64)},
}


@pytest.mark.parametrize("arrays", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_update_is_a_bad_message_wherever_it_comes(desk: AgentDesk, arrays: Update) -> None:
    """Alone or riding on a request: a bad message, which is counted and dropped, ends nothing."""
    message = PriorityUpdate(token=token(1), draw=0)
    with pytest.raises(BadMessage):
        desk.take_update(Received(message, arrays), message)
    with pytest.raises(BadMessage):
        ask(desk, HOLDER, 1, draw=0, arrays=arrays)
    assert not desk.held


def test_malformed_update_in_rounds_is_refused_when_it_comes_and_changes_no_turn(tmp_path: Path) -> None:
    """Found out only when its turn came, it would end the service, and nobody would have heard why."""
    rounds = make_rounds(tmp_path, actors=1)
    desk = AgentDesk(rounds.buffer, TrayTable(1 << 20), rounds)
    for segment, arrays in Player(0, (9, 8)).round(0):
        assert rounds.offer(segment, arrays) == "held"
    assert rounds.advance()
    learner = Learner(rounds)
    assert learner.draw()
    message = PriorityUpdate(token=token(1), draw=0)
    wrong = update(
        index=np.zeros(BATCH, np.int32),
        generation=np.ones(BATCH, np.uint64),
        priority=np.ones(BATCH, np.float32),
    )
    with pytest.raises(SpecMismatch):
        desk.take_update(Received(message, wrong), message)
    assert rounds.answered == 0
    assert learner.answer()
    learner.train()
