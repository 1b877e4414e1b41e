from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.exploration import Dice, epsilons, ladder_floors, radical_inverse
from shared.config import EpsilonConfig
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation
from worlds.base import AgentActions

LADDER = EpsilonConfig(start=1.0, base=0.4, spread=7.0, decay_steps=1_000)


CHOOSER = AgentSpec(observation=vector_observation(1), discrete=Discrete(n=5))
AIMER = AgentSpec(observation=vector_observation(1), continuous=Continuous(size=2, low=-1.0, high=5.0))
BOTH = AIMER.model_copy(update={"discrete": Discrete(n=5)})
GREEDY = AgentActions(np.full(4, -1, np.int64), np.full((4, 2), 3.0, np.float32))


def make_dice(**changes: object) -> Dice:
    fields = {
        "seed": 1,
        "agent": "agent_0",
        "actor_index": 0,
        "first_epoch": 0,
        "envs": 4,
        "spec": CHOOSER,
        "noise": 0.1,
    }
    return Dice(**(fields | changes))  # type: ignore[arg-type]


def rolls(dice: Dice, turns: int, epsilon: float) -> np.ndarray:
    return np.stack([dice.roll(GREEDY, np.full(4, epsilon)).discrete for _ in range(turns)])


def controls(dice: Dice, turns: int, epsilon: float) -> np.ndarray:
    return np.stack([dice.roll(GREEDY, np.full(4, epsilon)).continuous for _ in range(turns)])


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
    dice = make_dice()
    chosen = np.stack([dice.roll(GREEDY, np.array([0.0, 0.0, 1.0, 1.0])).discrete for _ in range(20)])
    assert (chosen[:, :2] == -1).all()
    assert (chosen[:, 2:] >= 0).all()


def test_dice_of_the_same_actor_repeat_and_of_others_differ() -> None:
    """Random numbers are fixed by seed, agent, actor and the epoch at which it joined."""
    first = rolls(make_dice(), 200, 1.0)
    np.testing.assert_array_equal(first, rolls(make_dice(), 200, 1.0))
    for change in ({"seed": 2}, {"agent": "agent_1"}, {"actor_index": 1}, {"first_epoch": 7}):
        assert (first != rolls(make_dice(**change), 200, 1.0)).any()


def test_dice_of_a_discrete_agent_give_the_numbers_that_they_always_gave() -> None:
    """What other agents may do besides changes nothing for one that only chooses."""
    chosen = rolls(make_dice(), 300, 0.5)
    assert chosen[:3].tolist() == [[-1, 1, -1, 0], [4, -1, 0, 2], [4, 0, -1, -1]]
    assert chosen[128:130].tolist() == [[0, -1, 4, 1], [0, 1, 3, -1]]
    assert chosen[-1].tolist() == [1, -1, 4, -1]
    assert make_dice().roll(GREEDY, np.ones(4)).continuous is None


def test_controls_at_random_fill_their_range_evenly() -> None:
    """With epsilon 1 each part of a control is uniform between low and high."""
    drawn = controls(make_dice(spec=BOTH), 2_000, 1.0)
    assert drawn.dtype == np.float32
    shares = np.histogram(drawn, bins=6, range=(-1.0, 5.0))[0] / drawn.size
    np.testing.assert_allclose(shares, 1 / 6, atol=0.01)
    assert np.corrcoef(drawn[..., 0].ravel(), drawn[..., 1].ravel())[0, 1] == pytest.approx(0.0, abs=0.05)


def test_greedy_controls_get_noise_in_shares_of_half_the_range() -> None:
    """With epsilon 0: around the greedy control, 0.1 of half of 6 wide; without noise it is untouched."""
    drawn = controls(make_dice(spec=BOTH), 2_000, 0.0)
    assert drawn.mean() == pytest.approx(3.0, abs=0.01)
    assert drawn.std() == pytest.approx(0.3, rel=0.03)
    assert (controls(make_dice(spec=BOTH, noise=0.0), 10, 0.0) == 3.0).all()


def test_controls_never_leave_their_range() -> None:
    """Noise of any size is clipped to what the world allows."""
    drawn = controls(make_dice(spec=BOTH, noise=5.0), 200, 0.3)
    assert drawn.min() == -1.0
    assert drawn.max() == 5.0


def test_random_actions_are_random_in_both_parts_at_once() -> None:
    """One throw decides for the whole action: a random choice goes with a random control."""
    dice = make_dice(spec=BOTH, noise=0.0)
    rolled = [dice.roll(GREEDY, np.full(4, 0.3)) for _ in range(2_000)]
    discrete = np.stack([actions.discrete for actions in rolled])
    control = np.stack([actions.continuous for actions in rolled])
    np.testing.assert_array_equal(discrete >= 0, (control != 3.0).all(-1))
    np.testing.assert_array_equal(discrete < 0, (control == 3.0).all(-1))
    assert (discrete >= 0).mean() == pytest.approx(0.3, abs=0.02)


def test_controls_of_the_same_actor_repeat_whatever_was_greedy_before() -> None:
    """Fixed by seed, agent, actor and epoch; the numbers of a turn do not depend on earlier chances."""
    first, second, other = make_dice(spec=AIMER), make_dice(spec=AIMER), make_dice(spec=AIMER, actor_index=1)
    controls(first, 150, 0.0)
    controls(second, 150, 1.0)
    controls(other, 150, 1.0)
    drawn = controls(first, 20, 0.5)
    np.testing.assert_array_equal(drawn, controls(second, 20, 0.5))
    assert (drawn != controls(other, 20, 0.5)).any()
    assert first.roll(GREEDY, np.ones(4)).discrete is None
