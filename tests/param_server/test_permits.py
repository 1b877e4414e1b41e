"""Permits to train: never more at once than there are, and none is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.param_server.permits import Permits


def test_permits_without_a_count_are_given_to_everybody() -> None:
    """There is nothing to keep."""
    permits = Permits(None)
    assert all(permits.grant(f"agent_{number}") for number in range(100))
    assert not permits.give_back("agent_0")


def test_permit_asked_for_again_is_the_same_one() -> None:
    """An answer that was lost costs nobody a place."""
    permits = Permits(2)
    assert permits.grant("a")
    assert permits.grant("a")
    assert permits.grant("b")
    assert not permits.grant("c")


@pytest.mark.parametrize("count", [1, 2])
def test_permit_given_back_is_free_for_the_next(count: int) -> None:
    """Once, whoever says so twice."""
    permits = Permits(count)
    holders = [f"agent_{number}" for number in range(count)]
    assert all(permits.grant(holder) for holder in holders)
    assert not permits.grant("next")
    assert permits.give_back(holders[0])
    assert not permits.give_back(holders[0])
    assert permits.grant("next")
    assert not permits.grant(holders[0])


@given(
    count=st.integers(1, 4),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=100),
)
def test_permits_any_order_are_never_more_than_there_are(count: int, moves: list[tuple[bool, int]]) -> None:
    """And whoever asks while one is free gets it."""
    permits, holding = Permits(count), set[int]()
    for asks, number in moves:
        if asks:
            granted = permits.grant(f"agent_{number}")
            assert granted == (number in holding or len(holding) < count)
            holding |= {number} if granted else set()
        else:
            assert permits.give_back(f"agent_{number}") == (number in holding)
            holding.discard(number)
        assert len(holding) <= count
