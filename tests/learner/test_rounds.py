"""A learner's place in the schedule: phases begin when replay says so and end with a publish."""

import pytest
from fake_link import Clock, FakeLink

from services.learner import rounds as rounds_module
from services.learner.rounds import REFUSED_PAUSE_S, LearnerRounds
from shared.errors import PeerSilent, Refused, RookeryError, StaleToken
from shared.messages import Done, PhaseGrant, PhaseRequest, Token

TOKEN = Token(agent="agent_0", number=3)


class Published:
    """Counts what the learner was told to publish."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def publish() -> Published:
    return Published()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds_module, "time", clock)
    return clock


@pytest.fixture
def rounds(link: FakeLink, publish: Published, clock: Clock) -> LearnerRounds:
    return LearnerRounds(link, TOKEN, publish)  # type: ignore[arg-type]


def test_phase_is_asked_for_once_until_it_is_over(rounds: LearnerRounds, link: FakeLink) -> None:
    """Neither while the question is open nor while the phase is trained is it asked again."""
    rounds.ask()
    rounds.ask()
    assert link.asked == [PhaseRequest(token=TOKEN, round=0)]
    link.answer(PhaseGrant(round=0, draws=2))
    rounds.ask()
    assert len(link.asked) == 1
    assert not rounds.at_boundary


def test_phase_ends_with_one_publish_after_its_last_draw(
    rounds: LearnerRounds, link: FakeLink, publish: Published
) -> None:
    """Then the next one is asked for, and its draws go on counting."""
    rounds.ask()
    link.answer(PhaseGrant(round=0, draws=2))
    rounds.on_trained()
    assert publish.times == 0
    rounds.on_trained()
    assert publish.times == 1
    assert not rounds.at_boundary
    rounds.on_published()
    assert rounds.at_boundary
    rounds.ask()
    assert link.asked[-1] == PhaseRequest(token=TOKEN, round=1)
    link.answer(PhaseGrant(round=1, draws=3))
    assert (rounds.due_draws, rounds.trained) == (3, 2)
    rounds.on_trained()
    assert publish.times == 2


def test_phase_without_draws_publishes_at_once(
    rounds: LearnerRounds, link: FakeLink, publish: Published
) -> None:
    """While the buffer fills every phase is empty, and still makes its version."""
    for number in range(3):
        rounds.ask()
        link.answer(PhaseGrant(round=number, draws=0))
        rounds.on_published()
    assert (publish.times, rounds.number) == (3, 3)


def test_resumed_rounds_go_on_between_two_phases(
    rounds: LearnerRounds, link: FakeLink, publish: Published
) -> None:
    """Nothing is published again for what was trained before."""
    rounds.resume(7, 40)
    assert rounds.at_boundary
    rounds.ask()
    assert link.asked == [PhaseRequest(token=TOKEN, round=7)]
    assert publish.times == 0
    link.answer(PhaseGrant(round=7, draws=41))
    rounds.on_trained()
    assert publish.times == 1


@pytest.mark.parametrize("error", [PeerSilent("nobody"), Refused("deadline", "not stored")])
def test_phase_that_is_not_granted_yet_is_asked_for_again(
    rounds: LearnerRounds, link: FakeLink, clock: Clock, error: RookeryError
) -> None:
    """A round may take longer to play than any deadline; but not as fast as messages travel."""
    rounds.ask()
    link.fail(error)
    rounds.ask()
    assert len(link.asked) == 1
    clock.now += REFUSED_PAUSE_S + 0.01
    rounds.ask()
    assert len(link.asked) == 2


@pytest.mark.parametrize("error", [StaleToken("replaced"), Refused("out_of_order", "phase 0 of round 40")])
def test_phase_that_can_never_be_granted_ends_the_learner(
    rounds: LearnerRounds, link: FakeLink, error: RookeryError
) -> None:
    """Asking again would be refused again, as fast as messages travel."""
    rounds.ask()
    with pytest.raises(type(error), match=str(error)):
        link.fail(error)


def test_answer_that_is_no_grant_is_not_taken(rounds: LearnerRounds, link: FakeLink) -> None:
    """What arrives is never taken on trust."""
    rounds.ask()
    with pytest.raises(RookeryError, match="Done where PhaseGrant was expected"):
        link.answer(Done())
    assert rounds.due_draws == 0
