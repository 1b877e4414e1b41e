"""Treasure hunt: its rules one by one, against a plain reference model, and against its yardsticks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, WorldError
from shared.specs import DType
from worlds.base import AgentActions
from worlds.treasure_hunt import DOWN, EMPTY, FIRST_ITEM, LEFT, RIGHT, STEPS, UP, WALL, TreasureHunt
from worlds.treasure_hunt_policies import NearestItemPolicy, RandomPolicy, mean_return

GEM, AGENT, SELF = FIRST_ITEM, FIRST_ITEM + 1, FIRST_ITEM + 2
VARIANT = {
    "agents": 2,
    "size": 21,
    "max_turns": 100,
    "gem_probability": 0.005,
    "items": {"gem": 10, "food": 5, "bone": -10},
}


def actions_of(*rows):
    """One row of actions per agent, one action per slot."""
    return {
        f"agent_{agent}": AgentActions(discrete=np.array(row, dtype=np.int64))
        for agent, row in enumerate(rows)
    }


def rewards_of(outcomes):
    return [outcome.reward.tolist() for outcome in outcomes.values()]


def seen_codes(world, agent, slot=0):
    """An observation as codes, [window side, window side]."""
    side = 2 * world.rules.view + 1
    rows = world.observe()[agent][slot].reshape(side, side, world.rules.channels)
    assert (rows.sum(axis=2) == 1).all()
    return rows.argmax(axis=2)


def scene(*agents, items=None, **options):
    world = TreasureHunt(1, 0, agents=len(agents), gem_probability=0.0, **options)
    world.arrange(0, agents, items)
    return world


@pytest.mark.parametrize(("action", "cell"), [(UP, (4, 5)), (DOWN, (6, 5)), (LEFT, (5, 4)), (RIGHT, (5, 6))])
def test_agent_steps_onto_empty_cell_moves_for_nothing(action, cell):
    """Each action moves one cell in its direction and pays nothing."""
    world = scene((5, 5))
    assert rewards_of(world.act(actions_of([action]))) == [[0.0]]
    assert tuple(world.agent_cells[0, 0]) == cell
    assert world.cells[0][cell] == AGENT
    assert world.cells[0][5, 5] == EMPTY


@pytest.mark.parametrize(("start", "action"), [((1, 4), UP), ((8, 4), DOWN), ((4, 1), LEFT), ((4, 8), RIGHT)])
def test_agent_steps_into_wall_stays_and_pays(start, action):
    """The ring cannot be entered from any side and costs a point."""
    world = scene(start)
    assert rewards_of(world.act(actions_of([action]))) == [[-1.0]]
    assert tuple(world.agent_cells[0, 0]) == start
    assert (world.cells[0] == WALL).sum() == 36


def test_agent_steps_onto_gem_takes_it_once():
    """A gem pays ten, and stepping back onto its cell pays nothing."""
    world = scene((5, 5), items={(5, 6): "gem"})
    assert [rewards_of(world.act(actions_of([move])))[0][0] for move in (RIGHT, LEFT, RIGHT)] == [
        10.0,
        0.0,
        0.0,
    ]
    assert not (world.cells == GEM).any()


def test_two_agents_at_one_gem_first_gets_it():
    """The earlier agent takes the gem and the cell; the later one bumps into it."""
    world = scene((5, 4), (5, 6), items={(5, 5): "gem"})
    assert rewards_of(world.act(actions_of([RIGHT], [LEFT]))) == [[10.0], [0.0]]
    assert world.agent_cells[:, 0].tolist() == [[5, 5], [5, 6]]


def test_agent_follows_earlier_one_into_the_cell_it_left():
    """A cell left by an earlier agent is free for a later one, but not the reverse."""
    world = scene((5, 5), (5, 4))
    assert rewards_of(world.act(actions_of([RIGHT], [RIGHT]))) == [[0.0], [0.0]]
    assert world.agent_cells[:, 0].tolist() == [[5, 6], [5, 5]]
    world.act(actions_of([LEFT], [LEFT]))
    assert world.agent_cells[:, 0].tolist() == [[5, 6], [5, 4]]


def test_act_with_actions_in_other_order_same_outcome():
    """The acting order is that of the ids, whatever the order of the mapping."""
    outcomes = []
    for reverse in (False, True):
        world = scene((5, 4), (5, 6), items={(5, 5): "gem"})
        given_actions = actions_of([RIGHT], [LEFT])
        ordered = dict(reversed(given_actions.items())) if reverse else given_actions
        outcomes.append(rewards_of(world.act(ordered)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("view", [1, 2, 4])
def test_window_at_corner_shows_wall_outside_the_map(view):
    """Everything beyond the ring is wall, however far the agent sees."""
    world = scene((1, 1), view=view)
    expected = np.full((2 * view + 1, 2 * view + 1), WALL)
    expected[view:, view:] = EMPTY
    expected[view, view] = SELF
    assert (seen_codes(world, "agent_0") == expected).all()


def test_window_shows_gem_other_agent_and_itself():
    """Each thing has its own channel at its own place, seen from either agent."""
    world = scene((5, 5), (4, 7), items={(7, 3): "gem", (1, 1): "gem"})
    seen = seen_codes(world, "agent_0")
    assert (seen[2, 2], seen[1, 4], seen[4, 0]) == (SELF, AGENT, GEM)
    assert (seen == EMPTY).sum() == 22
    assert seen_codes(world, "agent_1")[3, 0] == AGENT


def test_spec_of_default_hunt_has_125_bytes():
    """The default is 25 cells by 5 channels of bytes, 5 frames and 4 actions."""
    spec = TreasureHunt(2, 0).specs["agent_2"]
    assert (spec.observation.shape, spec.observation.dtype, spec.stack) == ((125,), DType.UINT8, 5)
    assert spec.discrete is not None
    assert spec.discrete.n == 4
    assert TreasureHunt(2, 0).observe()["agent_2"].shape == (2, 125)


def test_variant_items_have_own_channels_and_rewards():
    """Three kinds of items pay what is said of each and are seen apart."""
    world = TreasureHunt(1, 0, **{**VARIANT, "agents": 1, "gem_probability": 0.0})
    world.arrange(0, [(5, 5)], {(5, 6): "gem", (5, 7): "food", (5, 8): "bone"})
    assert world.specs["agent_0"].observation.shape == (25 * 7,)
    assert seen_codes(world, "agent_0")[2].tolist() == [EMPTY, EMPTY, 6, FIRST_ITEM, FIRST_ITEM + 1]
    assert [rewards_of(world.act(actions_of([RIGHT])))[0][0] for _ in range(3)] == [10.0, 5.0, -10.0]


def test_spawn_everywhere_leaves_agents_and_walls():
    """At probability 1 every inner cell without an agent becomes an item, and nothing else changes."""
    world = TreasureHunt(8, 3, gem_probability=1.0)
    before = world.cells
    world.begin_turn(np.ones(world.envs, np.bool_))
    assert (world.cells == np.where(before == EMPTY, GEM, before)).all()
    assert (world.cells[:, 1:-1, 1:-1] != WALL).all()


def test_spawn_never_leaves_all_cells_empty():
    """Probability 0 spawns nothing, with several kinds too, and divides by nothing."""
    world = TreasureHunt(8, 3, **{**VARIANT, "gem_probability": 0.0})
    before = world.cells
    world.begin_turn(np.ones(world.envs, np.bool_))
    assert (world.cells == before).all()


def test_spawn_rates_match_the_odds():
    """Cells fill with the given probability and kinds come with equal odds."""
    world = TreasureHunt(400, 5, **{**VARIANT, "gem_probability": 0.02})
    world.begin_turn(np.ones(world.envs, np.bool_))
    counts = [(world.cells == FIRST_ITEM + kind).sum() for kind in range(3)]
    cells = 400 * (19 * 19 - 2)
    assert sum(counts) == pytest.approx(0.02 * cells, rel=0.08)
    assert counts == pytest.approx([0.02 * cells / 3] * 3, rel=0.12)


def test_starts_fill_a_tiny_grid_on_distinct_cells():
    """Even when agents fill all inner cells, each starts on its own, and a fresh epoch has no items."""
    world = TreasureHunt(50, 1, agents=9, size=5)
    assert (world.cells[:, 1:-1, 1:-1] == world.rules.agent_code).all()
    for slot in range(50):
        assert len({tuple(cell) for cell in world.agent_cells[:, slot]}) == 9


def test_starts_over_many_epochs_cover_the_grid_evenly():
    """Every inner cell is a start about equally often."""
    world = TreasureHunt(4000, 2, agents=1)
    counts = (world.cells == AGENT).sum(axis=0)[1:-1, 1:-1]
    assert counts.min() > 30
    assert counts.max() < 110


def test_reset_of_some_slots_leaves_the_others():
    """Only masked slots start anew; the others keep agents and gems."""
    world = TreasureHunt(6, 4, gem_probability=0.3)
    world.begin_turn(np.ones(world.envs, np.bool_))
    cells, places = world.cells, world.agent_cells
    mask = np.array([True, False, False, True, False, False])
    world.reset(mask)
    assert (world.cells[~mask] == cells[~mask]).all()
    assert (world.agent_cells[:, ~mask] == places[:, ~mask]).all()
    assert not (world.cells[mask] == GEM).any()
    assert ((world.cells == AGENT).sum(axis=(1, 2)) == 3).all()


def test_reset_of_no_slot_changes_nothing():
    """An empty mask draws no random numbers, so the run goes on as if it had not been called."""
    one, other = TreasureHunt(4, 9), TreasureHunt(4, 9)
    one.reset(np.zeros(4, dtype=np.bool_))
    for world in (one, other):
        world.begin_turn(np.ones(world.envs, np.bool_))
    assert (one.cells == other.cells).all()


def recorded(seed):
    world = TreasureHunt(5, seed)
    chosen = np.random.default_rng(0).integers(4, size=(30, 3, 5))
    frames = []
    for turn, rows in enumerate(chosen):
        world.begin_turn(np.ones(world.envs, np.bool_))
        frames += [array.copy() for array in world.observe().values()]
        frames += [outcome.reward for outcome in world.act(actions_of(*rows)).values()]
        world.reset(np.full(5, turn == 20))
    return np.concatenate([frame.reshape(-1).astype(np.float32) for frame in frames])


def test_same_seed_same_actions_same_run():
    """The seed and the actions decide everything; another seed gives another run."""
    assert (recorded(7) == recorded(7)).all()
    assert (recorded(7) != recorded(8)).any()


def test_observations_of_earlier_turns_stay_as_they_were():
    """Returned arrays are fresh: later turns do not write into them."""
    world = TreasureHunt(4, 1, gem_probability=0.5)
    seen = world.observe()
    kept = {agent: rows.copy() for agent, rows in seen.items()}
    world.begin_turn(np.ones(world.envs, np.bool_))
    world.act(actions_of([0] * 4, [1] * 4, [2] * 4))
    world.observe()
    assert all((seen[agent] == kept[agent]).all() for agent in seen)


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_act_with_action_out_of_range_is_refused_unmoved(wrong):
    """An action that does not exist is named, and no agent has moved."""
    world = scene((5, 5), (3, 3))
    with pytest.raises(WorldError, match=f"action {wrong} does not exist"):
        world.act(actions_of([UP], [wrong]))
    assert world.agent_cells[:, 0].tolist() == [[5, 5], [3, 3]]


def test_act_without_an_agents_actions_is_refused():
    """A missing agent, a missing discrete part or a wrong shape is named."""
    world = scene((5, 5), (3, 3))
    with pytest.raises(WorldError, match="agent_1 has no discrete action"):
        world.act(actions_of([UP]))
    with pytest.raises(WorldError, match=r"agent_0 are int64\[2\], not int64\[1\]"):
        world.act(actions_of([UP, UP], [UP]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "size = 2"),
        ({"size": "big"}, "size = 'big'"),
        ({"gem_probability": 1.5}, "gem_probability = 1.5"),
        ({"items": {}}, "items"),
        ({"items": {"gem": float("nan")}}, "items.gem"),
        ({"items": {"gem": 1}, "gem_reward": 5}, "leave gem_reward out"),
        ({"size": 3, "agents": 2}, "2 agents do not fit into the 1 inner cells"),
    ],
)
def test_hunt_with_impossible_option_says_which(options, message):
    """A value outside its bounds is refused by name."""
    with pytest.raises(ConfigError, match=message):
        TreasureHunt(1, 0, **options)


@pytest.mark.parametrize(
    ("agents", "items"),
    [([(0, 4)], {}), ([(4, 4), (5, 5)], {}), ([(4, 4)], {(4, 4): "gem"}), ([(4, 4)], {(5, 5): "ruby"})],
)
def test_arrange_with_impossible_scene_is_refused(agents, items):
    """A scene needs the right number of agents inside the ring, one thing per cell, and known items."""
    with pytest.raises(WorldError):
        TreasureHunt(1, 0, agents=1).arrange(0, agents, items)


class ReferenceHunt:
    """One grid, one cell at a time: the rules as they are told, with nothing clever."""

    def __init__(self, cells, agents, rewards, view):
        self.cells = [[int(code) for code in row] for row in cells]
        self.agents = [tuple(int(part) for part in cell) for cell in agents]
        self.rewards = rewards
        self.agent_code = FIRST_ITEM + len(rewards)
        self.view = view

    def move(self, agent, action):
        row, column = self.agents[agent]
        down, right = STEPS[action]
        target = (row + down, column + right)
        found = self.cells[target[0]][target[1]]
        if found == WALL:
            return -1.0
        if found == self.agent_code:
            return 0.0
        self.cells[row][column] = EMPTY
        self.cells[target[0]][target[1]] = self.agent_code
        self.agents[agent] = target
        return 0.0 if found == EMPTY else self.rewards[found - FIRST_ITEM]

    def seen(self, agent):
        row, column = self.agents[agent]
        reach = range(-self.view, self.view + 1)
        one_hot = []
        for down, right in product(reach, reach):
            code = self.agent_code + 1 if (down, right) == (0, 0) else self.at(row + down, column + right)
            one_hot += [int(channel == code) for channel in range(self.agent_code + 2)]
        return one_hot

    def at(self, row, column):
        inside = 0 <= row < len(self.cells) and 0 <= column < len(self.cells)
        return self.cells[row][column] if inside else WALL


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(4, 8),
    agents=st.integers(1, 4),
    view=st.integers(1, 3),
    kinds=st.integers(1, 3),
    turns=st.integers(1, 8),
    data=st.data(),
)
def test_hunt_under_any_actions_equals_reference(seed, *, size, agents, view, kinds, turns, data):
    """Cells, places, rewards and observations equal those of a one-grid model in plain Python."""
    envs = 2
    paid = {f"kind_{kind}": float(10 - 7 * kind) for kind in range(kinds)}
    world = TreasureHunt(envs, seed, agents=agents, size=size, view=view, items=paid, gem_probability=0.2)
    for _ in range(turns):
        before = world.cells
        world.begin_turn(np.ones(world.envs, np.bool_))
        changed = world.cells != before
        assert (before[changed] == EMPTY).all()
        assert ((world.cells[changed] >= FIRST_ITEM) & (world.cells[changed] < FIRST_ITEM + kinds)).all()
        models = [
            ReferenceHunt(world.cells[slot], world.agent_cells[:, slot], list(paid.values()), view)
            for slot in range(envs)
        ]
        seen = world.observe()
        chosen = data.draw(
            st.lists(
                st.lists(st.integers(0, 3), min_size=envs, max_size=envs), min_size=agents, max_size=agents
            )
        )
        outcomes = world.act(actions_of(*chosen))
        for slot, model in enumerate(models):
            expected_seen = [model.seen(agent) for agent in range(agents)]
            expected_rewards = [model.move(agent, chosen[agent][slot]) for agent in range(agents)]
            assert [seen[agent][slot].tolist() for agent in world.specs] == expected_seen
            assert [outcome.reward[slot] for outcome in outcomes.values()] == expected_rewards
            assert world.cells[slot].tolist() == model.cells
            assert [tuple(cell) for cell in world.agent_cells[:, slot]] == model.agents
        assert not any(outcome.terminated.any() for outcome in outcomes.values())


def test_random_policy_on_default_hunt_gets_64():
    """Uniformly random agents get the yardstick's 64 per agent and epoch."""
    world = TreasureHunt(256, 0)
    assert mean_return(world, RandomPolicy(0), epochs=1024) == pytest.approx(64, abs=2)


def test_nearest_gem_policy_on_default_hunt_gets_162():
    """Agents that walk to the nearest gem they see get the yardstick's 162 per agent and epoch."""
    world = TreasureHunt(256, 0)
    assert mean_return(world, NearestItemPolicy(world.rules, 0), epochs=1024) == pytest.approx(162, abs=3)


def test_nearest_item_policy_on_variant_avoids_bones():
    """With bones about, the policy still earns far more than walking at random."""
    world = TreasureHunt(64, 0, **VARIANT)
    greedy = mean_return(world, NearestItemPolicy(world.rules, 0), epochs=64)
    assert greedy > mean_return(world, RandomPolicy(0), epochs=64) + 50
