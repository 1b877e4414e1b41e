from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.actor.evaluation import PolicyWeights, greedy_returns
from services.actor.rollout import Rollout
from services.actor.scripts import build_scripts, try_scripts
from shared.config import Config, build_config
from shared.errors import ConfigError, WorldError
from shared.networks import QNetwork
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation
from worlds import AgentActions, Outcome, TreasureHunt, World, agent_ids
from worlds.base import Array

ENVS = 4
HYBRID = AgentSpec(
    observation=vector_observation(2),
    discrete=Discrete(n=3),
    continuous=Continuous(size=2, low=-0.9, high=0.3),
)


class StillWorld(World):
    """Nothing happens in it; an observation is the number of turns so far. Every agent gets 1 each turn."""

    def __init__(self, spec: AgentSpec, agents: int, max_turns: int = 5) -> None:
        self.envs, self.max_turns = ENVS, max_turns
        self.specs = dict.fromkeys(agent_ids(agents), spec)
        self.turns = 0
        self.acted: list[Mapping[str, AgentActions]] = []

    def reset(self, slots: Array) -> None:
        self.turns = 0

    def begin_turn(self, slots: Array) -> None: ...

    def observe(self) -> dict[str, Array]:
        return {agent: np.full((ENVS, 2), self.turns, np.float32) for agent in self.specs}

    def act(self, actions: Mapping[str, AgentActions]) -> dict[str, Outcome]:
        self.acted.append(actions)
        self.turns += 1
        nobody = np.zeros(ENVS, np.bool_)
        return {agent: Outcome(np.ones(ENVS, np.float32), nobody) for agent in self.specs}


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a user's module; its name comes back."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"brought_{abs(hash((source, str(tmp_path)))):x}"
        header = "import numpy as np\nfrom worlds import AgentActions\n"
        (tmp_path / f"{name}.py").write_text(header + source)
        return name

    return write


def make_config(agents: dict[str, Any], count: int = 2) -> Config:
    return build_config(
        {"world": {"agents": count}, "agents": agents, "learner": {"network": {"hidden": [4]}}}
    )


def build(config: Config, world: World, seed: int = 0) -> Any:
    return build_scripts(config, world, seed=seed, actor_index=0, first_epoch=0)["agent_1"]


def test_random_agent_draws_every_action_between_the_bounds_of_its_spec() -> None:
    """All choices and the whole continuous range come up, evenly, and never anything outside."""
    world = StillWorld(HYBRID, 2)
    script = build(make_config({"agent_1": {"algorithm": "random"}}), world)
    played = [script(np.zeros((ENVS, 2), np.float32)) for _ in range(3_000)]
    choices = np.stack([actions.discrete for actions in played])
    controls = np.stack([actions.continuous for actions in played])
    assert choices.shape == (3_000, ENVS)
    assert controls.shape == (3_000, ENVS, 2)
    assert controls.dtype == np.float32
    assert np.bincount(choices.ravel()) / choices.size == pytest.approx([1 / 3] * 3, abs=0.02)
    assert (controls.min(), controls.max()) == pytest.approx((-0.9, 0.3), abs=0.01)
    assert controls.mean() == pytest.approx(-0.3, abs=0.02)
    assert controls.min() >= np.float32(-0.9)
    assert controls.max() <= np.float32(0.3)


def test_random_agent_with_one_kind_of_action_has_no_other() -> None:
    """A part that the spec does not have is None."""
    for spec in (
        HYBRID.model_copy(update={"discrete": None}),
        HYBRID.model_copy(update={"continuous": None}),
    ):
        actions = build(make_config({"agent_1": {"algorithm": "random"}}), StillWorld(spec, 2))(None)
        assert (actions.discrete is None) == (spec.discrete is None)
        assert (actions.continuous is None) == (spec.continuous is None)


def test_random_agents_with_the_same_seed_play_the_same_and_others_do_not() -> None:
    """Seed, agent, actor and first epoch decide."""
    config, world = make_config({"agent_1": {"algorithm": "random"}}), StillWorld(HYBRID, 2)
    first, again, other = (build(config, world, seed)(None) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.continuous, again.continuous)
    assert not np.array_equal(first.continuous, other.continuous)


def test_rollout_with_agents_that_learn_nothing_counts_their_returns_and_not_their_steps() -> None:
    """Of theirs nothing goes to replay; everything that is produced is of the agents that learn."""
    spec = HYBRID.model_copy(update={"continuous": None})
    world = StillWorld(spec, 3)
    config = make_config({"agent_0": {"algorithm": "random"}, "agent_2": {"algorithm": "random"}}, 3)
    rollout = Rollout(config, world, actor_index=0, first_epoch=0)
    cuts = [pair for _ in range(10) for pair in rollout.turn(0.0)] + rollout.close()
    assert {agent for agent, _cut in cuts} == {"agent_1"}
    assert rollout.produced_steps == {"agent_1": 10 * ENVS}
    assert rollout.played.agent_steps == sum(cut.owned for _agent, cut in cuts) == 10 * ENVS
    assert rollout.played.return_sums == dict.fromkeys(world.specs, 10.0 * ENVS)
    assert [group.agents for group in rollout.groups] == [("agent_1",)]


COUNTING = """
class Counting:
    def __init__(self, spec, agent, seed):
        self.spec, self.turns = spec, 0
        assert agent == "agent_1" and 0 <= seed < 2**63

    def __call__(self, observations):
        self.turns += 1
        assert self.turns == observations[0, 0] + 1, (self.turns, observations)
        return AgentActions(discrete=np.full(len(observations), self.turns % self.spec.discrete.n))
"""


def test_scripted_agent_follows_the_users_script_from_its_first_turn(bring: Callable[[str], str]) -> None:
    """It sees the newest frame; what was tried before was another script, not this one."""
    world = StillWorld(HYBRID.model_copy(update={"continuous": None}), 2, max_turns=100)
    config = make_config({"agent_1": {"algorithm": "scripted", "script": f"{bring(COUNTING)}:Counting"}})
    try_scripts(config, world)
    rollout = Rollout(config, world, actor_index=0, first_epoch=0)
    for _ in range(3):
        rollout.turn(0.0)
    chosen = [actions["agent_1"].discrete for actions in world.acted]
    assert [turn.tolist() for turn in chosen] == [[1] * ENVS, [2] * ENVS, [0] * ENVS]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("factory = 3", "is a int, not a function or class"),
        (
            "def factory(spec, agent): ...",
            "unexpected keyword argument 'seed'; a factory of scripts is called",
        ),
        (
            "def factory(spec, agent, seed): return 7",
            "returned a int: expected something that is called with",
        ),
        ("def factory(spec, agent, seed): raise KeyError('x')", "raised KeyError: 'x'"),
        (
            "def factory(spec, agent, seed): return lambda seen: 1 / 0",
            "raised ZeroDivisionError: division by zero on its first turn",
        ),
        (
            "def factory(spec, agent, seed): return lambda seen: np.zeros(4, int)",
            "the script of agent_1 returned a ndarray, not worlds.AgentActions",
        ),
        (
            "def factory(spec, agent, seed): return lambda seen: AgentActions(discrete=[0, 0, 0, 0])",
            r"discrete actions that are a list, not int64\[4\]",
        ),
        (
            "def factory(spec, agent, seed): return lambda seen: AgentActions(discrete=np.zeros(3, int))",
            r"discrete actions that are int64\[3\], not int64\[4\]",
        ),
        (
            "def factory(spec, agent, seed): return lambda seen: AgentActions(discrete=np.full(4, 3))",
            "chose the discrete action 3, which is not in 0 to 2",
        ),
        (
            "def factory(spec, agent, seed): return lambda seen: AgentActions(\n"
            "    discrete=np.zeros(4, int), continuous=np.zeros((4, 1), np.float32))",
            "returned continuous actions, which its spec does not have",
        ),
    ],
)
def test_script_that_cannot_work_is_refused_in_words_before_anything_is_played(
    bring: Callable[[str], str], source: str, words: str
) -> None:
    """The actor ends with the reason instead of sending nonsense to the world."""
    world = StillWorld(HYBRID.model_copy(update={"continuous": None}), 2)
    config = make_config({"agent_1": {"algorithm": "scripted", "script": f"{bring(source)}:factory"}})
    with pytest.raises(ConfigError, match=words):
        try_scripts(config, world)
    assert world.acted == []


def test_script_with_continuous_actions_that_are_not_numbers_is_refused(bring: Callable[[str], str]) -> None:
    """Not a number is outside any bounds."""
    source = (
        "def factory(spec, agent, seed): return lambda seen: AgentActions(\n"
        "    discrete=np.zeros(4, int), continuous=np.full((4, 2), np.nan, np.float32))"
    )
    config = make_config({"agent_1": {"algorithm": "scripted", "script": f"{bring(source)}:factory"}})
    script = build(config, StillWorld(HYBRID, 2))
    with pytest.raises(WorldError, match=r"chose the continuous action nan, which is not in -0\.9 to 0\.3"):
        script(np.zeros((ENVS, 2), np.float32))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("", "agents.agent_1: StillWorld offers no script of its own; set script to yours"),
        ("nearest", r"agents\.agent_1\.script = 'nearest': a script is written \"package\.module:factory\""),
        ("nowhere.at.all:factory", "importing nowhere.at.all failed"),
        ("worlds.base:Scrip", "module worlds.base has no 'Scrip'; did you mean Script?"),
    ],
)
def test_script_that_cannot_be_found_is_refused_in_words(script: str, words: str) -> None:
    """The key, its value and what to do about it."""
    config = make_config({"agent_1": {"algorithm": "scripted", "script": script}})
    with pytest.raises(ConfigError, match=words):
        build(config, StillWorld(HYBRID, 2))


def test_scripted_agent_of_treasure_hunt_walks_to_the_nearest_gem_in_evaluation() -> None:
    """The world's own script earns far more than a random agent, beside one that has weights."""
    config = make_config({"agent_1": {"algorithm": "scripted"}, "agent_2": {"algorithm": "random"}}, 3)
    spec = TreasureHunt(1, 0, agents=3).specs["agent_0"]
    network = QNetwork(spec, config.learner.network)
    tensors = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    returns = greedy_returns(config, {"agent_0": PolicyWeights(3, tensors)}, 100, seed=5)
    assert set(returns) == {"agent_0", "agent_1", "agent_2"}
    assert returns["agent_1"].mean() > 140
    assert 40 < returns["agent_2"].mean() < 90
