"""The limiter's arithmetic: it paces, it explains itself, and it never stops both sides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.replay.limiter import Limiter


def at(limiter: Limiter, inserted: int, sampled: int) -> Limiter:
    limiter.inserted_steps = limiter.drawable_steps = inserted
    limiter.sampled_steps = sampled
    return limiter


@given(
    min_steps=st.integers(1, 10_000),
    ratio=st.floats(0.01, 1000),
    tolerance=st.floats(0, 1e6),
    inserted=st.integers(0, 10**7),
    drawable=st.integers(0, 20_000),
    sampled=st.integers(0, 10**9),
    offset=st.floats(-1e9, 1e9),
    full=st.booleans(),
    batch=st.integers(1, 65_536),
    interval=st.integers(1, 100_000),
)
def test_limiter_any_counts_one_side_can_go_on(
    *,
    min_steps: int,
    ratio: float,
    tolerance: float,
    inserted: int,
    drawable: int,
    sampled: int,
    offset: float,
    full: bool,
    batch: int,
    interval: int,
) -> None:
    """Whatever the counts and settings, samples and inserts are never both held."""
    limiter = at(Limiter(min_steps, ratio, tolerance, interval), inserted, sampled)
    limiter.drawable_steps, limiter.full, limiter.offset = drawable, full, offset
    assert limiter.can_sample(batch) or not limiter.inserts_ahead()
    assert limiter.can_sample(batch) or limiter.reason(batch)


@given(
    ratio=st.floats(0.1, 50),
    tolerance=st.floats(0, 5000),
    segment=st.integers(1, 64),
    batch=st.integers(1, 1024),
    moves=st.lists(st.booleans(), min_size=200, max_size=200),
)
def test_limiter_obeyed_keeps_ratio_within_tolerance(
    ratio: float, tolerance: float, segment: int, batch: int, moves: list[bool]
) -> None:
    """When both sides obey, the balance stays within the tolerance and one move."""
    limiter = Limiter(100, ratio, tolerance)
    for insert in moves:
        if insert and not limiter.inserts_ahead():
            at(limiter, limiter.inserted_steps + segment, limiter.sampled_steps)
        elif limiter.can_sample(batch):
            at(limiter, limiter.inserted_steps, limiter.sampled_steps + batch)
        if limiter.filled:
            assert limiter.ahead <= tolerance + segment * ratio + 1e-6
            assert limiter.ahead >= -tolerance - batch - 1e-6


def test_filling_to_min_steps_creates_no_debt() -> None:
    """At the moment the buffer is filled the balance is zero: nobody is ahead."""
    limiter = at(Limiter(2000, 8.0, 256.0), 2000, 0)
    assert limiter.ahead == 0
    assert not limiter.inserts_ahead()
    assert limiter.can_sample(256)


def test_full_ring_below_min_steps_flows() -> None:
    """A ring full of short segments can be sampled although it never reaches min_steps."""
    limiter = at(Limiter(2000, 8.0, 256.0), 5000, 0)
    limiter.drawable_steps = 300
    assert not limiter.can_sample(1)
    limiter.full = True
    assert limiter.can_sample(1)


@pytest.mark.parametrize(
    ("inserted", "sampled", "words"),
    [
        (800, 0, "1,200 more steps wanted before batches flow"),
        (2425, 0, "actors are 3,400 samples ahead of the learner"),
        (2000, 200, "the learner is 456 samples ahead of the actors"),
        (2000, 0, ""),
    ],
)
def test_reason_each_state_says_who_waits(inserted: int, sampled: int, words: str) -> None:
    """The reason names who is ahead and by how much, and is empty when all flows."""
    assert at(Limiter(2000, 8.0, 256.0), inserted, sampled).reason(256) == words


def test_forgive_after_lonely_inserts_leaves_only_tolerance() -> None:
    """A learner that comes back finds at most the tolerance owed, so it does not stop the actors."""
    limiter = at(Limiter(100, 8.0, 50.0), 100_000, 0)
    assert limiter.inserts_ahead()
    limiter.forgive()
    assert limiter.ahead == 50.0
    assert not limiter.inserts_ahead()
    before = limiter.offset
    limiter.forgive()
    assert limiter.offset == before


def test_adjust_ratio_while_running_starts_balance_anew() -> None:
    """A new ratio applies from now on: the past is not held against anyone."""
    limiter = at(Limiter(100, 8.0, 50.0), 10_000, 79_200)
    limiter.adjust(samples_per_insert=1.0)
    assert limiter.ahead == 0.0
    at(limiter, 10_100, 79_200)
    assert limiter.ahead == 100.0


def test_adjust_before_filled_keeps_no_debt() -> None:
    """A new ratio before min_steps are in still gives a zero balance when they are."""
    limiter = at(Limiter(100, 8.0, 50.0), 40, 0)
    limiter.adjust(samples_per_insert=2.0, tolerance_samples=10.0)
    at(limiter, 100, 0)
    assert limiter.ahead == 0.0
    assert limiter.tolerance_samples == 10.0


@given(
    ratio=st.floats(0.1, 20),
    interval=st.integers(2, 500),
    segment=st.integers(1, 64),
    batch=st.integers(1, 256),
    moves=st.lists(st.booleans(), min_size=100, max_size=300),
)
def test_interval_obeyed_never_draws_from_an_interval_that_is_not_full(
    ratio: float, interval: int, segment: int, batch: int, moves: list[bool]
) -> None:
    """With the tolerance that replay gives it, whole intervals are paid for before they are drawn from."""
    limiter = at(Limiter(100, ratio, 8 * batch + (segment + interval) * ratio, interval), 100, 0)
    for insert in moves:
        if insert and not limiter.inserts_ahead():
            at(limiter, limiter.inserted_steps + segment, limiter.sampled_steps)
        elif limiter.can_sample(batch) and not limiter.inserts_ahead():
            at(limiter, limiter.inserted_steps, limiter.sampled_steps + batch)
            full_intervals = (limiter.inserted_steps - 100) // interval
            assert limiter.sampled_steps <= full_intervals * interval * ratio + 1e-6


def test_interval_played_step_by_step_draws_in_bursts() -> None:
    """Between two multiples of the interval the samples stand still, at each one they catch up."""
    limiter, bursts = at(Limiter(100, 2.0, 500.0, 50), 100, 0), {}
    for inserted in range(100, 351):
        at(limiter, inserted, limiter.sampled_steps)
        before = limiter.sampled_steps
        while limiter.can_sample(20):
            at(limiter, inserted, limiter.sampled_steps + 20)
        if limiter.sampled_steps > before:
            bursts[inserted] = limiter.sampled_steps
    assert bursts == {150: 100, 200: 200, 250: 300, 300: 400, 350: 500}


def test_interval_of_one_step_pays_at_once() -> None:
    """Without train_interval every step pays for its own samples, and the learner may run ahead a little."""
    limiter = at(Limiter(100, 2.0, 60.0), 110, 0)
    assert limiter.waiting_samples == 0.0
    assert limiter.can_sample(80)
    assert not limiter.can_sample(81)


def test_reason_within_an_interval_says_how_many_steps_are_missing() -> None:
    """Not that the learner is ahead, which it is not."""
    limiter = at(Limiter(100, 2.0, 500.0, 50), 130, 0)
    assert limiter.ahead == 60.0
    assert limiter.reason(20) == "20 more steps wanted: batches come every 50 steps"


@pytest.mark.parametrize(
    ("inserted", "due"), [(0, 0.0), (99, 0.0), (100, 0.0), (149, 0.0), (150, 125.0), (249, 250.0)]
)
def test_due_samples_count_whole_intervals_since_the_buffer_was_filled(inserted: int, due: float) -> None:
    """What a schedule may draw in all, whatever was drawn so far."""
    assert at(Limiter(100, 2.5, 10.0, 50), inserted, 77).due_samples == due
