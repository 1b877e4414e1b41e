"""Copies: many slots from an ordinary single environment."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import WorldError
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation
from worlds.base import AgentActions
from worlds.copies import Copies

SPEC = AgentSpec(observation=vector_observation(2), discrete=Discrete(n=3), continuous=Continuous(size=2))


class Counting:
    """Counts turns from a random start; the reward tells which action arrived."""

    specs = {"agent_0": SPEC, "agent_1": SPEC}  # noqa: RUF012
    max_turns = 9

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.turn = 0
        self.start = self.rng.random()

    def begin_turn(self):
        self.turn += 1

    def observe(self):
        return {agent: np.array([self.start, self.turn]) for agent in self.specs}

    def act(self, actions):
        return {
            agent: (action.discrete + action.continuous.sum(), action.discrete == 2)
            for agent, action in actions.items()
        }


def everywhere(envs):
    return np.ones(envs, dtype=np.bool_)


def test_copies_stack_observations_in_the_specs_type():
    """What single environments see becomes one float32 array per agent, each row its own copy's."""
    world = Copies(Counting, envs=4, seed=0)
    world.reset(everywhere(4))
    world.begin_turn(np.ones(world.envs, np.bool_))
    seen = world.observe()
    assert list(seen) == list(world.specs) == ["agent_0", "agent_1"]
    assert seen["agent_0"].dtype == np.float32
    assert seen["agent_0"].shape == (4, 2)
    assert len(set(seen["agent_0"][:, 0])) == 4
    assert (world.envs, world.max_turns) == (4, 9)


def test_copies_with_same_seed_start_alike():
    """The seed decides every copy's seed."""
    starts = [Copies(Counting, envs=3, seed=seed).observe()["agent_0"] for seed in (5, 5, 6)]
    assert (starts[0] == starts[1]).all()
    assert (starts[0] != starts[2]).any()


def test_copies_act_gives_each_slot_its_own_action():
    """Discrete and continuous parts reach the copy of their slot, and its answer comes back there."""
    world = Copies(Counting, envs=3, seed=0)
    control = np.array([[0, 0], [0.25, 0], [0.25, 0.5]], dtype=np.float32)
    outcomes = world.act(
        {
            "agent_1": AgentActions(np.array([0, 1, 2]), control),
            "agent_0": AgentActions(np.array([2, 0, 0]), control),
        }
    )
    assert outcomes["agent_1"].reward.tolist() == [0.0, 1.25, 2.75]
    assert outcomes["agent_1"].terminated.tolist() == [False, False, True]
    assert outcomes["agent_0"].terminated.tolist() == [True, False, False]
    assert outcomes["agent_0"].reward.dtype == np.float32


def test_copies_reset_touches_only_masked_slots():
    """A copy outside the mask goes on counting."""
    world = Copies(Counting, envs=3, seed=0)
    world.begin_turn(np.ones(world.envs, np.bool_))
    before = world.observe()["agent_0"]
    world.reset(np.array([False, True, False]))
    after = world.observe()["agent_0"]
    assert after[:, 1].tolist() == [1, 0, 1]
    assert (after[[0, 2]] == before[[0, 2]]).all()


@pytest.mark.parametrize(
    ("observation", "found"),
    [
        (np.zeros(3), r"float64\[3\]"),
        (np.zeros(1), r"float64\[1\]"),
        (np.zeros(2, dtype=complex), r"complex128\[2\]"),
    ],
)
def test_copies_with_misfit_observation_say_whose(observation, found):
    """A shape that numpy would stretch, or a type that it would cut, is refused with agent and copy."""

    class Misfit(Counting):
        def observe(self):
            return {"agent_0": np.zeros(2), "agent_1": observation}

    with pytest.raises(WorldError, match=rf"agent_1 in copy 0 is {found}"):
        Copies(Misfit, envs=2, seed=0).observe()


def test_copies_without_an_agents_answer_say_so():
    """Leaving out a terminated agent is refused, since its row would hold anything."""

    class Forgetful(Counting):
        def act(self, actions):
            return {"agent_0": (0.0, False)}

    world = Copies(Forgetful, envs=1, seed=0)
    with pytest.raises(WorldError, match=r"act\(\) of copy 0 answered for"):
        world.act(
            {
                agent: AgentActions(np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=np.float32))
                for agent in world.specs
            }
        )


def test_copies_that_differ_are_refused():
    """All copies feed one network, so their specs and lengths must agree."""

    class Moody(Counting):
        def __init__(self, seed):
            super().__init__(seed)
            self.max_turns = seed

    with pytest.raises(WorldError, match="copy 1 has other specs or max_turns"):
        Copies(Moody, envs=2, seed=0)
