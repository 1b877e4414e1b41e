"""The gate of a run in rounds: which rounds may be played, and when the run is over."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.param_server.rounds import RoundGate
from shared.schedule import Schedule, version_after


def schedule(lag: int = 0, rounds: int | None = None) -> Schedule:
    steps = None if rounds is None else rounds * 20
    return Schedule(actors=2, envs=1, max_turns=5, agents=2, lag_rounds=lag, agent_steps=steps)


def both(version: int) -> dict[str, int]:
    return {"agent_0": version, "agent_1": version}


@pytest.mark.parametrize(("lag", "playable"), [(0, {0: 1, 1: 2, 2: 3}), (1, {0: 1, 1: 1, 2: 2, 3: 3})])
def test_round_may_be_played_from_the_version_that_the_lag_says(lag: int, playable: dict[int, int]) -> None:
    """Without a lag after every phase, with one a round is played while the last one is trained on."""
    for number, wanted in playable.items():
        gate = RoundGate(schedule(lag))
        assert not gate.may_play(number, both(wanted - 1))
        assert not gate.may_play(number, both(wanted) | {"agent_1": wanted - 1})
        assert gate.may_play(number, both(wanted))
        assert gate.may_play(number, both(wanted + 1))


@pytest.mark.parametrize(
    ("versions", "first"), [((0, 0), 0), ((1, 0), 0), ((1, 1), 0), ((4, 4), 3), ((5, 4), 3)]
)
def test_first_round_is_the_first_that_somebody_has_not_trained_on(
    versions: tuple[int, int], first: int
) -> None:
    """Where a new run begins, and a resumed one goes on."""
    assert RoundGate(schedule()).first_round(dict(zip("ab", versions, strict=True))) == first


def test_limit_of_rounds_ends_playing_and_then_the_run() -> None:
    """Three rounds: the fourth is never played, and the run is over with version 4 of everybody."""
    gate = RoundGate(schedule(rounds=3))
    assert gate.may_play(2, both(3))
    assert not gate.is_past(2)
    assert gate.is_past(3)
    assert not gate.may_play(3, both(9))
    assert not gate.is_over(both(4) | {"agent_1": 3})
    assert gate.is_over(both(4))


def test_run_without_a_limit_is_never_over_by_itself() -> None:
    """Only time or a person ends it."""
    gate = RoundGate(schedule())
    assert gate.may_play(10**6, both(10**6 + 1))
    assert not gate.is_over(both(10**9))


def test_stop_while_only_some_actors_have_begun_lets_the_others_follow() -> None:
    """A round that one actor plays is played by all, stored and trained on; no other is begun."""
    gate = RoundGate(schedule(rounds=100))
    assert gate.may_play(5, both(6))  # the first actor
    assert gate.stop()
    assert gate.may_play(5, both(6))  # the second one asks later
    assert not gate.may_play(6, both(7))
    assert not gate.is_over(both(6))
    assert gate.is_over(both(7))
    assert not gate.stop()  # no news


def test_stop_with_two_rounds_begun_waits_for_both() -> None:
    """With a lag one round is played while the one before it is trained on."""
    gate = RoundGate(schedule(lag=1))
    assert gate.may_play(4, both(4))
    assert gate.may_play(5, both(5) | {"agent_1": 5})
    gate.stop()
    assert gate.may_play(4, both(5))  # a slow actor
    assert not gate.is_over(both(6))
    assert gate.is_over(both(version_after(5)))


def test_stop_before_anything_was_begun_is_over_with_the_first_versions() -> None:
    """As soon as every learner is there it can leave a checkpoint."""
    gate = RoundGate(schedule(rounds=100))
    gate.stop()
    assert not gate.may_play(0, both(1))
    assert not gate.is_over({})
    assert not gate.is_over(both(1) | {"agent_1": 0})
    assert gate.is_over(both(1))


def test_resumed_run_stopped_before_it_began_is_over_as_it_stands() -> None:
    """What was trained on before it was resumed is not asked for again."""
    gate = RoundGate(schedule(rounds=100))
    assert gate.first_round(both(8)) == 7
    gate.stop()
    assert gate.is_over(both(8))


def test_resumed_run_at_its_limit_is_over_at_once() -> None:
    """Which is how a resume learns that the limit must be raised first."""
    assert RoundGate(schedule(rounds=7)).is_over(both(8))
    assert not RoundGate(schedule(rounds=8)).is_over(both(8))


@settings(max_examples=200)
@given(
    lag=st.integers(0, 1),
    limit=st.one_of(st.none(), st.integers(1, 8)),
    stop_at=st.integers(0, 60),
    moves=st.lists(st.integers(0, 3), max_size=60),
)
def test_gate_whoever_is_faster_every_begun_round_is_played_and_trained_on(
    lag: int, limit: int | None, stop_at: int, moves: list[int]
) -> None:
    """Two actors and two learners at any speed, stopped at any moment: the run ends between two rounds."""
    gate, versions = RoundGate(schedule(lag, limit)), both(1)
    played = [0, 0]  # rounds that each actor has behind it
    for moment, move in enumerate(itertools.chain(moves, itertools.cycle(range(4)))):
        if moment == max(stop_at, 1):
            gate.stop()
        if gate.is_over(versions):
            break
        assert moment < 1_000, "the run never ends"
        if move < 2 and gate.may_play(played[move], versions):
            assert played[move] <= min(versions.values()) - 1 + lag
            played[move] += 1
        agent = f"agent_{move - 2}"
        if move >= 2 and versions[agent] - 1 < min(played):  # a complete round that it has not trained on
            versions[agent] += 1
    assert played[0] == played[1]
    assert set(versions.values()) == {played[0] + 1}
