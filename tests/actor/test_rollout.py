from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actor.rollout import Rollout
from services.actor.rounds import RoundPlayer
from services.actor.segments import Cut
from shared.config import Config, NetworkConfig, build_config
from shared.errors import WorldError
from shared.networks import QNetwork
from shared.specs import AgentSpec, Discrete, vector_observation
from worlds.base import AgentActions, Array, Outcome, World, agent_ids

SPEC = AgentSpec(observation=vector_observation(3), stack=2, discrete=Discrete(n=3))
HIDDEN = (4,)


class ScriptedWorld(World):
    """Agents live as long as the script says; an observation is (epoch, looks in this epoch, agent).

    `lives[agent][k]` is how many turns the agent lives in the k-th epoch of the world, over all slots, in the
    order in which slots are reset; the script is repeated. Arrays are spoilt by the next call, as the
    contract allows.
    """

    def __init__(self, envs: int, max_turns: int, lives: list[list[int]]) -> None:
        self.envs, self.max_turns, self.lives = envs, max_turns, lives
        self.specs = dict.fromkeys(agent_ids(len(lives)), SPEC)
        self.epochs = 0
        self.epoch = np.full(envs, -1)
        self.looks = np.zeros(envs, np.int64)  # begin_turn calls since the reset
        self.turns = np.zeros(envs, np.int64)
        self.log: list[str] = []
        self.started: list[int] = []
        self.ended: list[int] = []
        self.acted: list[dict[str, Array]] = []
        self._lent: list[Array] = []

    def reward(self, agent: int, epoch: int, turn: int) -> float:
        return 100.0 * agent + 10.0 * epoch + turn

    def life(self, agent: int, epoch: int) -> int:
        return self.lives[agent][epoch % len(self.lives[agent])]

    def reset(self, slots: Array) -> None:
        self._spoil("reset")
        for slot in np.flatnonzero(slots):
            self.epoch[slot], self.looks[slot], self.turns[slot] = self.epochs, 0, 0
            self.epochs += 1

    def begin_turn(self, slots: Array) -> None:
        self._spoil("begin_turn")
        self.looks[slots] += 1

    def observe(self) -> dict[str, Array]:
        self._spoil("observe")
        seen = {}
        for place, agent in enumerate(self.specs):
            seen[agent] = np.stack([self.epoch, self.looks, np.full(self.envs, place)], axis=1).astype(
                np.float32
            )
        self._lent = list(seen.values())
        return seen

    def act(self, actions: Mapping[str, AgentActions]) -> dict[str, Outcome]:
        self._spoil("act")
        # Every observation of a turn was made after exactly one move of the world since the last one.
        np.testing.assert_array_equal(self.looks, self.turns + 1)
        self.acted.append({agent: np.array(own.discrete) for agent, own in actions.items()})
        outcomes = {}
        for place, agent in enumerate(self.specs):
            reward = [self.reward(place, e, t) for e, t in zip(self.epoch, self.turns, strict=True)]
            over = [t + 1 >= self.life(place, e) for e, t in zip(self.epoch, self.turns, strict=True)]
            outcomes[agent] = Outcome(np.array(reward, np.float32), np.array(over))
        self._lent = [
            array for outcome in outcomes.values() for array in (outcome.reward, outcome.terminated)
        ]
        self.turns += 1
        return outcomes

    def on_epoch_start(self, slots: Array, epochs: Array) -> None:
        self._spoil("on_epoch_start")
        self.started.extend(epochs[slots].tolist())

    def on_epoch_end(self, slots: Array, epochs: Array) -> None:
        self._spoil("on_epoch_end")
        self.ended.extend(epochs[slots].tolist())

    def _spoil(self, call: str) -> None:
        self.log.append(call)
        for array in self._lent:
            array[...] = np.nan if array.dtype.kind == "f" else True
        self._lent = []


def make_config(segment_steps: int = 4, n_step: int = 2, max_turns: int = 6) -> Config:
    return build_config(
        {
            "actor": {"segment_steps": segment_steps},
            "world": {"max_turns": max_turns},
            "learner": {"n_step": n_step, "network": {"hidden": list(HIDDEN)}},
        }
    )


def make_rollout(world: ScriptedWorld, config: Config, first_epoch: int = 0) -> Rollout:
    return Rollout(config, world, actor_index=0, first_epoch=first_epoch)


def play(rollout: Rollout, turns: int) -> list[tuple[str, Cut]]:
    return [pair for _ in range(turns) for pair in rollout.turn(0.0)]


def lengths_played(world: ScriptedWorld) -> dict[int, int]:
    """Of each epoch that ended: its turns, the lives of its agents and the limit alone deciding."""
    return {
        epoch: min(world.max_turns, max(world.life(agent, epoch) for agent in range(len(world.lives))))
        for epoch in world.ended
    }


SCRIPTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    lives=SCRIPTS,
    envs=st.integers(1, 3),
    turns=st.integers(1, 25),
    segment_steps=st.integers(1, 6),
    n_step=st.integers(1, 4),
)
def test_rollout_of_any_script_records_what_happened(
    lives: list[list[int]], envs: int, turns: int, segment_steps: int, n_step: int
) -> None:
    """Every step of a living agent is owned by one segment, in order, with its true row and its true end."""
    world = ScriptedWorld(envs, 6, lives)
    rollout = make_rollout(world, make_config(segment_steps, n_step))
    cuts = play(rollout, turns) + rollout.close()
    steps: dict[tuple[str, int], int] = defaultdict(int)
    for agent, cut in cuts:
        check_cut(world, agent, cut, first_turn=steps[agent, cut.epoch])
        steps[agent, cut.epoch] += cut.owned
    for place, agent in enumerate(world.specs):
        own = {epoch: count for (name, epoch), count in steps.items() if name == agent}
        assert rollout.produced_steps[agent] == sum(own.values())
        for epoch, length in lengths_played(world).items():
            assert own[epoch] == min(length, world.life(place, epoch))
        for slot in range(envs):
            epoch, so_far = int(world.epoch[slot]), int(world.turns[slot])
            assert own.get(epoch, 0) == min(so_far, world.life(place, epoch))
    check_counts(world, rollout, turns)


def check_cut(world: ScriptedWorld, agent: str, cut: Cut, first_turn: int) -> None:
    place = list(world.specs).index(agent)
    start = first_turn - cut.before
    observed = cut.arrays["observation"]
    np.testing.assert_array_equal(observed[:, 0], cut.epoch)
    np.testing.assert_array_equal(observed[:, 1], start + 1 + np.arange(cut.rows))  # the last one included
    np.testing.assert_array_equal(observed[:, 2], place)
    turns = start + np.arange(cut.rows - 1)
    np.testing.assert_array_equal(cut.arrays["turn"], turns)
    np.testing.assert_array_equal(cut.arrays["reward"], [world.reward(place, cut.epoch, t) for t in turns])
    terminated = turns + 1 == world.life(place, cut.epoch)
    np.testing.assert_array_equal(cut.arrays["terminated"], terminated)
    np.testing.assert_array_equal(cut.arrays["truncated"], (turns + 1 == world.max_turns) & ~terminated)


def check_counts(world: ScriptedWorld, rollout: Rollout, turns: int) -> None:
    played = rollout.played
    assert played.env_steps == turns * world.envs
    assert played.agent_steps == sum(rollout.produced_steps.values())
    assert played.epochs == len(world.ended)
    for place, agent in enumerate(world.specs):
        expected = sum(
            world.reward(place, epoch, turn)
            for epoch, length in lengths_played(world).items()
            for turn in range(min(length, world.life(place, epoch)))
        )
        assert played.return_sums[agent] == pytest.approx(expected)


class BlindWorld(ScriptedWorld):
    """From the third look on, agent_1 sees something that is no number."""

    def observe(self) -> dict[str, Array]:
        seen = super().observe()
        seen["agent_1"][self.looks == 3, 1] = np.inf
        return seen


def test_world_that_shows_what_is_no_number_is_told_so() -> None:
    """Stored, such a row would be drawn and skipped again and again; what a dead agent sees means nothing."""
    world = BlindWorld(2, 6, [[6], [6]])
    with pytest.raises(WorldError, match="agent_1 an observation that is not finite"):
        play(make_rollout(world, make_config()), 6)
    dead_by_then = BlindWorld(2, 6, [[6], [1]])
    assert play(make_rollout(dead_by_then, make_config()), 6)


def test_agents_that_terminate_at_different_times_end_the_epoch_together() -> None:
    """A dead agent adds no steps, and the epoch goes on until the last one is dead."""
    world = ScriptedWorld(1, 10, [[2], [5]])
    rollout = make_rollout(world, make_config(max_turns=10))
    play(rollout, 4)
    assert world.ended == []
    play(rollout, 1)
    assert world.ended == [0]
    assert rollout.produced_steps == {"agent_0": 2, "agent_1": 5}
    assert rollout.played.return_sums == {"agent_0": 0.0 + 1.0, "agent_1": 500.0 + 10.0}


def test_slots_that_end_at_different_times_begin_anew_alone() -> None:
    """Each slot has its own epoch; numbers are given in the order of their beginnings."""
    world = ScriptedWorld(2, 10, [[3, 5]])
    rollout = make_rollout(world, make_config(max_turns=10), first_epoch=40)
    play(rollout, 5)
    assert world.started == [40, 41, 42, 43]
    assert world.ended == [40, 41]
    assert rollout.played.epochs == 2


def test_epoch_at_its_last_turn_is_truncated_and_not_terminated() -> None:
    """The limit on turns is not an end of the world: the last step bootstraps."""
    world = ScriptedWorld(1, 3, [[99]])
    rollout = make_rollout(world, make_config(segment_steps=8, max_turns=3))
    ((_agent, cut),) = play(rollout, 3)
    assert cut.arrays["truncated"].tolist() == [False, False, True]
    assert not cut.arrays["terminated"].any()
    assert cut.arrays["observation"][-1].tolist() == [0.0, 4.0, 0.0]  # the fourth look of epoch 0, no reset


def test_agent_that_terminates_on_the_last_turn_is_terminated_alone() -> None:
    """A real end wins over the limit."""
    world = ScriptedWorld(1, 3, [[3]])
    ((_agent, cut),) = play(make_rollout(world, make_config(max_turns=3)), 3)
    assert cut.arrays["terminated"].tolist() == [False, False, True]
    assert not cut.arrays["truncated"].any()


def test_close_cuts_everything_and_claims_no_end() -> None:
    """What is open leaves as segments without an end; nothing is left and no epoch is counted."""
    world = ScriptedWorld(3, 50, [[99], [99]])
    rollout = make_rollout(world, make_config(segment_steps=4, n_step=3, max_turns=50))
    cuts = play(rollout, 7)
    owned = sum(cut.owned for _agent, cut in cuts)
    rest = rollout.close()
    assert owned + sum(cut.owned for _agent, cut in rest) == 7 * 3 * 2
    assert not any(cut.arrays[end].any() for _agent, cut in rest for end in ("terminated", "truncated"))
    assert rollout.close() == []
    assert rollout.played.epochs == 0


def test_world_moves_once_for_each_look_of_a_slot() -> None:
    """A turn is one move, one look, one act; where an epoch ended, one move and look more after the reset."""
    world = ScriptedWorld(2, 3, [[99]])
    rollout = make_rollout(world, make_config(max_turns=3))
    start = ["reset", "on_epoch_start", "begin_turn", "observe"]
    assert world.log == start
    play(rollout, 3)
    turn = ["act", "begin_turn", "observe"]
    assert world.log == start + 3 * turn + ["on_epoch_end", *start]


def test_agent_without_weights_acts_at_random_and_with_them_greedily() -> None:
    """Before the first version everything is explored; afterwards epsilon decides."""
    world = ScriptedWorld(8, 1_000, [[9_999]])
    rollout = make_rollout(world, make_config(max_turns=1_000))
    rollout.floors[:] = 0.0
    for _ in range(30):
        rollout.turn(1e9)
    assert len(np.unique([actions["agent_0"] for actions in world.acted])) == 3
    network = QNetwork(SPEC, NetworkConfig(hidden=HIDDEN))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.head.bias[1 + 2] = 1.0  # the advantage of action 2
    rollout.load("agent_0", 7, {name: value.numpy() for name, value in network.state_dict().items()})
    world.acted.clear()
    cuts = [pair for _ in range(30) for pair in rollout.turn(1e9)] + rollout.close()
    assert all((actions["agent_0"] == 2).all() for actions in world.acted)
    assert cuts[-1][1].arrays["version"][-1] == 7


def test_rollout_with_the_same_seed_plays_the_same() -> None:
    """Two actors with one index, seed and first epoch choose the same actions."""
    worlds = [ScriptedWorld(2, 6, [[4], [9]]) for _ in range(2)]
    for world in worlds:
        play(make_rollout(world, make_config()), 12)
    for first, second in zip(worlds[0].acted, worlds[1].acted, strict=True):
        for agent, actions in first.items():
            np.testing.assert_array_equal(actions, second[agent])


def test_noisy_rollout_explores_by_seed_actor_and_first_epoch() -> None:
    """Without epsilon the noise alone decides; other numbers give other noise, the same ones the same."""

    def explored(seed: int, actor_index: int, first_epoch: int) -> np.ndarray:
        config = build_config(
            {
                "seed": seed,
                "actor": {"epsilon": {"start": 0.0, "base": 0.0}},
                "learner": {"network": {"hidden": list(HIDDEN), "noisy": True}},
            }
        )
        world = ScriptedWorld(4, 1_000, [[9_999]])
        rollout = Rollout(config, world, actor_index=actor_index, first_epoch=first_epoch)
        network = QNetwork(SPEC, NetworkConfig(hidden=HIDDEN, noisy=True))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(0.1)
        rollout.load("agent_0", 1, {name: value.numpy() for name, value in network.state_dict().items()})
        for _ in range(30):
            rollout.turn(0.0)
        return np.array([actions["agent_0"] for actions in world.acted])

    first = explored(1, 2, 3)
    assert len(np.unique(first)) == 3
    np.testing.assert_array_equal(first, explored(1, 2, 3))
    for others in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert (first != explored(*others)).any()


def test_noisy_round_is_the_same_whatever_was_played_before() -> None:
    """In lockstep a round is a pure function of its number; the noise is no exception."""
    config = build_config(
        {
            "world": {"agents": 1, "max_turns": 8},
            "actor": {"envs": 3, "epsilon": {"start": 0.0, "base": 0.0}},
            "learner": {"network": {"hidden": list(HIDDEN), "noisy": True}},
        }
    )
    players = [RoundPlayer(config, 0) for _ in range(2)]
    spec = players[0].specs["agent_0"]
    network = QNetwork(spec, config.learner.network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.1)  # all actions are worth the same: the noise decides
    for player in players:
        player.load("agent_0", 1, {name: value.numpy() for name, value in network.state_dict().items()})
    for number in range(3):
        players[0].play(number)
    played = [player.play(3)[0]["agent_0"] for player in players]
    for first, second in zip(*played, strict=True):
        np.testing.assert_array_equal(first.arrays["action"], second.arrays["action"])
    assert len({int(action) for cut in played[0] for action in cut.arrays["action"]}) > 1
