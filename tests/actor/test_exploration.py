from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.exploration import Dice, epsilons, ladder_floors, radical_inverse
from shared.config import EpsilonConfig

LADDER = EpsilonConfig(start=1.0, base=0.4, spread=7.0, decay_steps=1_000)


def make_dice(**changes: object) -> Dice:
    fields = {"seed": 1, "agent": "agent_0", "actor_index": 0, "first_epoch": 0, "envs": 4, "actions": 5}
    return Dice(**(fields | changes))  # type: ignore[arg-type]


def rolls(dice: Dice, turns: int, epsilon: float) -> np.ndarray:
    greedy, chance = np.full(4, -1, np.int64), np.full(4, epsilon)
    return np.stack([dice.roll(greedy, chance) for _ in range(turns)])


def test_radical_inverse_of_the_first_numbers_halves_the_gaps() -> None:
    """Each new actor stands in the largest gap between the others."""
    assert [radical_inverse(index) for index in range(6)] == [0.0, 0.5, 0.25, 0.75, 0.125, 0.625]


def test_ladder_of_one_actor_falls_from_base_by_equal_factors() -> None:
    """Slot 0 explores most; each next slot's floor is the same factor lower."""
    floors = ladder_floors(LADDER, 0, 8)
    assert floors[0] == pytest.approx(0.4)
    np.testing.assert_allclose(floors[1:] / floors[:-1], 0.4 ** (7.0 / 8))
    assert floors[-1] > 0.4 ** (1 + LADDER.spread)


@given(actors=st.integers(1, 16), envs=st.integers(1, 16))
def test_ladders_of_several_actors_never_share_a_floor(actors: int, envs: int) -> None:
    """However many actors there are, together they fill the ladder without repeating a place."""
    floors = np.concatenate([ladder_floors(LADDER, index, envs) for index in range(actors)])
    assert len(np.unique(floors.round(15))) == actors * envs
    assert ((floors <= 0.4) & (floors > 0.4**8)).all()


def test_epsilon_falls_in_a_line_from_start_to_the_floor_and_stays() -> None:
    """Start at the beginning, the middle half way, the floor at the end and ever after."""
    floors = np.array([0.2, 0.0])
    assert epsilons(LADDER, floors, 0).tolist() == [1.0, 1.0]
    np.testing.assert_allclose(epsilons(LADDER, floors, 500), [0.6, 0.5])
    np.testing.assert_allclose(epsilons(LADDER, floors, 1_000), floors)
    np.testing.assert_allclose(epsilons(LADDER, floors, 1e9), floors)


def test_dice_with_epsilon_zero_are_greedy_and_with_one_never() -> None:
    """The two ends are exact, over more turns than one block of random numbers."""
    assert (rolls(make_dice(), 300, 0.0) == -1).all()
    chosen = rolls(make_dice(), 300, 1.0)
    assert set(np.unique(chosen)) == set(range(5))


def test_dice_explore_as_often_as_epsilon_says() -> None:
    """The share of random actions is epsilon, and they are spread evenly."""
    chosen = rolls(make_dice(), 5_000, 0.3)
    assert (chosen >= 0).mean() == pytest.approx(0.3, abs=0.02)
    shares = np.bincount(chosen[chosen >= 0]) / (chosen >= 0).sum()
    np.testing.assert_allclose(shares, 0.2, atol=0.03)


def test_dice_with_an_epsilon_of_each_slot_use_it() -> None:
    """Each slot has its own place on the ladder."""
    dice, greedy = make_dice(), np.full(4, -1, np.int64)
    chosen = np.stack([dice.roll(greedy, np.array([0.0, 0.0, 1.0, 1.0])) for _ in range(20)])
    assert (chosen[:, :2] == -1).all()
    assert (chosen[:, 2:] >= 0).all()


def test_dice_of_the_same_actor_repeat_and_of_others_differ() -> None:
    """Random numbers are fixed by seed, agent, actor and the epoch at which it joined."""
    first = rolls(make_dice(), 200, 1.0)
    np.testing.assert_array_equal(first, rolls(make_dice(), 200, 1.0))
    for change in ({"seed": 2}, {"agent": "agent_1"}, {"actor_index": 1}, {"first_epoch": 7}):
        assert (first != rolls(make_dice(**change), 200, 1.0)).any()
