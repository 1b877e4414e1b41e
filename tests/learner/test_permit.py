"""The permit to train: asked for once, held for a slice of time, given back."""

import pytest
from fake_link import Clock, FakeLink

from services.learner import permit as permit_module
from services.learner.permit import REFUSED_PAUSE_S, SLICE_S, Permit
from shared.errors import PeerSilent, Refused, RookeryError, StaleToken
from shared.messages import Done, PermitRequest, PermitReturn, Token

TOKEN = Token(agent="agent_0", number=3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(permit_module, "time", clock)
    return clock


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def permit(link: FakeLink, clock: Clock) -> Permit:
    return Permit(link, TOKEN, limited=True)  # type: ignore[arg-type]


def test_permit_without_a_limit_is_never_asked_for(link: FakeLink) -> None:
    """All agents may train: nothing travels."""
    free = Permit(link, TOKEN, limited=False)  # type: ignore[arg-type]
    assert free.obtain()
    assert not free.due
    free.give_back()
    assert not link.asked
    assert not link.told


def test_permit_is_asked_for_once_and_used_until_given_back(permit: Permit, link: FakeLink) -> None:
    """While the question is open training waits; afterwards no more is asked."""
    assert not permit.obtain()
    assert not permit.obtain()
    assert link.asked == [PermitRequest(token=TOKEN)]
    link.answer(Done())
    assert permit.obtain()
    assert permit.obtain()
    permit.give_back()
    assert link.told == [PermitReturn(token=TOKEN)]
    assert not permit.obtain()
    assert len(link.asked) == 2


def test_permit_is_due_after_its_slice(permit: Permit, link: FakeLink, clock: Clock) -> None:
    """Not before, or agents would change places with every update; and not once it is given back."""
    permit.obtain()
    clock.now += 2 * SLICE_S
    assert not permit.due
    link.answer(Done())
    clock.now += 0.9 * SLICE_S
    assert not permit.due
    clock.now += 0.2 * SLICE_S
    assert permit.due
    permit.give_back()
    assert not permit.due


def test_permit_that_is_not_held_is_not_given_back(permit: Permit, link: FakeLink) -> None:
    """Twice, or before it came: nothing is said."""
    permit.give_back()
    assert not link.told


@pytest.mark.parametrize("error", [PeerSilent("nobody"), Refused("not_yet", "others train")])
def test_permit_refused_for_now_is_asked_for_again(
    permit: Permit, link: FakeLink, clock: Clock, error: RookeryError
) -> None:
    """The parameter server may be gone for a while, or others take long; it is asked now and then."""
    permit.obtain()
    link.fail(error)
    assert not permit.obtain()
    assert len(link.asked) == 1
    clock.now += REFUSED_PAUSE_S + 0.01
    assert not permit.obtain()
    assert len(link.asked) == 2


def test_permit_refused_to_a_replaced_learner_ends_it(permit: Permit, link: FakeLink) -> None:
    """A newer learner has the agent."""
    permit.obtain()
    with pytest.raises(StaleToken):
        link.fail(StaleToken("replaced"))
