"""The arithmetic that lockstep and sequential mode agree on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import load_config
from shared.schedule import Schedule, phases_done, version_after


def make(**changes: int | None) -> Schedule:
    numbers: dict[str, int | None] = {
        "actors": 3,
        "envs": 4,
        "max_turns": 5,
        "agents": 2,
        "lag_rounds": 1,
        "agent_steps": None,
    }
    return Schedule(**(numbers | changes))  # type: ignore[arg-type]


def test_schedule_of_a_config_has_its_numbers() -> None:
    """Every key that the schedule depends on."""
    settings = ["actor.count=3", "actor.envs=4", "world.max_turns=5", "world.agents=2"]
    settings += ["parallel.lag_rounds=0", "run.agent_steps=7"]
    assert Schedule.of(load_config(None, settings, {})) == make(lag_rounds=0, agent_steps=7)


@pytest.mark.parametrize(
    ("agent_steps", "rounds"), [(None, None), (1, 1), (119, 1), (120, 1), (121, 2), (1200, 10)]
)
def test_rounds_are_as_many_as_the_steps_need(agent_steps: int | None, rounds: int | None) -> None:
    """Whole rounds of 3 actors, 4 environments, 5 turns and 2 agents."""
    assert make().round_steps == 60
    assert make(agent_steps=agent_steps).rounds == rounds


@pytest.mark.parametrize(("lag", "versions"), [(0, [1, 2, 3, 4]), (1, [1, 1, 2, 3])])
def test_round_is_played_with_the_version_that_the_lag_says(lag: int, versions: list[int]) -> None:
    """The first round always with the first version."""
    assert [make(lag_rounds=lag).version_for(number) for number in range(4)] == versions


@given(phase=st.integers(0, 10**9))
def test_version_after_a_phase_counts_it_as_done(phase: int) -> None:
    """The two ways between phases and versions are inverse; version 1 is before all of them."""
    assert phases_done(version_after(phase)) == phase + 1
    assert phases_done(1) == phases_done(0) == 0


def test_steps_before_a_turn_rise_by_all_slots_of_all_actors() -> None:
    """From one turn to the next, and from the last turn of a round to the first of the next one."""
    schedule = make()
    steps = [schedule.steps_before(number, turn) for number in range(3) for turn in range(5)]
    assert steps == list(range(0, 15 * 12, 12))
    assert schedule.steps_before(1, 0) == schedule.round_steps


def test_first_epochs_of_all_rounds_and_actors_are_their_own() -> None:
    """The dice are seeded with them: no two rounds may roll the same."""
    schedule = make()
    firsts = [schedule.first_epoch(number, actor) for number in range(10) for actor in range(3)]
    assert firsts == list(range(0, 120, 4))
