from __future__ import annotations

import numpy as np
import pytest
import torch

from services.actor.policies import PolicyGroup, group_agents
from shared.config import LearnerConfig, NetworkConfig, build_config
from shared.errors import ConfigError, SpecMismatch
from shared.networks import HybridNetwork, QNetwork
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(3), stack=2, discrete=Discrete(n=4))
NETWORK = NetworkConfig(hidden=(6,))
AGENTS = ("agent_0", "agent_1")
ENVS = 5


def make_group() -> PolicyGroup:
    return PolicyGroup(AGENTS, SPEC, LearnerConfig(network=NETWORK), ENVS)


def make_noisy_group(seed: int | None) -> PolicyGroup:
    """Weights of which only the noise differs between actions; without a seed it is a greedy group."""
    config = LearnerConfig(network=NETWORK.model_copy(update={"noisy": True}))
    group = PolicyGroup(AGENTS, SPEC, config, ENVS)
    if seed is not None:
        group.explore(torch.Generator().manual_seed(seed))
    weights = {name: np.zeros_like(value[0].numpy()) for name, value in group.network.named_parameters()}
    weights["head.bias"][1 + 2] = 0.01  # the advantage of action 2
    weights["head.bias_sigma"][:] = 1.0
    for agent in AGENTS:
        group.load(agent, 1, weights)
    return group


def actions_of(group: PolicyGroup, turns: int) -> np.ndarray:
    """[turns, agents, envs]"""
    return np.array([[actions.discrete for actions in group.best_actions()] for _ in range(turns)])


def make_weights(seed: int) -> tuple[QNetwork, dict[str, np.ndarray]]:
    torch.manual_seed(seed)
    network = QNetwork(SPEC, NETWORK)
    return network, {name: value.detach().numpy() for name, value in network.state_dict().items()}


def parameters_of(group: PolicyGroup) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in group.network.named_parameters()}


def observe_noise(group: PolicyGroup, turns: int = 1) -> None:
    rng = np.random.default_rng(0)
    for _ in range(turns):
        group.observe([rng.normal(size=(ENVS, 3)).astype(np.float32) for _ in AGENTS])


def test_loaded_agents_act_as_their_own_networks() -> None:
    """Each agent plays with the weights it was given and with nobody else's."""
    group = make_group()
    networks = []
    for place, agent in enumerate(AGENTS):
        network, weights = make_weights(place)
        networks.append(network)
        group.load(agent, place + 5, weights)
    observe_noise(group, turns=3)
    actions = group.best_actions()
    for place, network in enumerate(networks):
        values = network(torch.from_numpy(group.stacks[place]).reshape(ENVS, 6))
        np.testing.assert_array_equal(actions[place].discrete, values.argmax(-1).numpy())
    assert group.versions.tolist() == [5, 6]


def test_new_group_has_version_zero() -> None:
    """Version 0 says that no weights came yet."""
    assert make_group().versions.tolist() == [0, 0]


def test_loaded_weights_are_copied() -> None:
    """Weights may be views on a frame that is soon gone."""
    group, (_network, weights) = make_group(), make_weights(0)
    weights = {name: value.copy() for name, value in weights.items()}
    group.load("agent_0", 1, weights)
    before = parameters_of(group)
    for value in weights.values():
        value[...] = np.nan
    after = parameters_of(group)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_read_only_weights_are_loaded() -> None:
    """Arrays from the wire cannot be written to, and need not be."""
    _network, weights = make_weights(0)
    frozen = {
        name: np.frombuffer(value.tobytes(), value.dtype).reshape(value.shape)
        for name, value in weights.items()
    }
    make_group().load("agent_0", 1, frozen)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "transposed"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(damage: str) -> None:
    """Wrong names or shapes: the old weights and the old version stay, whole."""
    group = make_group()
    group.load("agent_0", 3, make_weights(0)[1])
    before = parameters_of(group)
    _network, weights = make_weights(1)
    last = list(weights)[-1]
    if damage == "missing":
        del weights[last]
    elif damage == "extra":
        weights["more"] = np.zeros(1, np.float32)
    elif damage == "shape":
        weights[last] = np.zeros((*weights[last].shape, 1), np.float32)
    else:
        weights["head.weight"] = weights["head.weight"].T
    with pytest.raises(SpecMismatch, match="weights of agent_0"):
        group.load("agent_0", 4, weights)
    after = parameters_of(group)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert group.versions.tolist() == [3, 0]


def test_stacks_hold_the_newest_observations_in_order() -> None:
    """The newest frame is last, and zeros stand before the first."""
    group = make_group()
    for value in (1.0, 2.0, 3.0):
        group.observe([np.full((ENVS, 3), value, np.float32), np.full((ENVS, 3), 10 * value, np.float32)])
        if value == 1.0:
            np.testing.assert_array_equal(group.stacks[0, 0, :, 0], [0.0, 1.0])
    np.testing.assert_array_equal(group.stacks[0, 0, :, 0], [2.0, 3.0])
    np.testing.assert_array_equal(group.stacks[1, 4, :, 2], [20.0, 30.0])


def test_forgotten_slots_begin_with_zeros_and_others_go_on() -> None:
    """A new episode sees nothing of the last one."""
    group = make_group()
    observe_noise(group, turns=2)
    before = group.stacks.copy()
    slots = np.array([True, False, False, True, False])
    group.forget(slots)
    assert (group.stacks[:, slots] == 0).all()
    np.testing.assert_array_equal(group.stacks[:, ~slots], before[:, ~slots])


def test_agents_of_one_shape_share_a_group_and_others_have_their_own() -> None:
    """Spec and network decide; other differences between learners do not."""
    config = build_config({"agents": {"agent_1": {"lr": 0.5}, "agent_2": {"network": {"hidden": [7]}}}})
    other = SPEC.model_copy(update={"stack": 1})
    specs = {"agent_0": SPEC, "agent_1": SPEC, "agent_2": SPEC, "agent_3": other}
    groups = group_agents(config, specs, ENVS)
    assert [group.agents for group in groups] == [("agent_0", "agent_1"), ("agent_2",), ("agent_3",)]
    assert groups[1].learner.network.hidden == (7,)
    assert groups[2].stacks.shape == (1, ENVS, 1, 3)


HYBRID_SPEC = SPEC.model_copy(update={"continuous": Continuous(size=2, low=-0.9, high=0.5)})


def test_hybrid_agents_that_learn_differently_have_groups_of_their_own() -> None:
    """What the critic is given decides the network's shape, though the network's section is the same."""
    config = build_config(
        {"learner": {"algorithm": "hybrid"}, "agents": {"agent_1": {"hybrid": {"continuous": "imitate"}}}}
    )
    specs = dict.fromkeys(("agent_0", "agent_1", "agent_2"), HYBRID_SPEC)
    groups = group_agents(config, specs, ENVS)
    assert [group.agents for group in groups] == [("agent_0", "agent_2"), ("agent_1",)]


@pytest.mark.parametrize("continuous", ["imitate", "improve"])
def test_loaded_hybrid_agents_act_as_their_own_networks(continuous: str) -> None:
    """The control of each agent is its own network's, within the bounds, and so is its choice."""
    learner = LearnerConfig.model_validate(
        {"algorithm": "hybrid", "network": NETWORK, "hybrid": {"continuous": continuous}}
    )
    group = PolicyGroup(AGENTS, HYBRID_SPEC, learner, ENVS)
    networks = []
    for place, agent in enumerate(AGENTS):
        torch.manual_seed(place)
        networks.append(HybridNetwork.build(HYBRID_SPEC, learner))
        with torch.no_grad():
            networks[-1].control_head.weight.mul_(5.0)
        group.load(agent, 1, {name: value.numpy() for name, value in networks[-1].state_dict().items()})
    observe_noise(group, turns=3)
    for place, actions in enumerate(group.best_actions()):
        with torch.no_grad():
            alone = networks[place].act(torch.from_numpy(group.stacks[place]).reshape(ENVS, 6))
        np.testing.assert_array_equal(actions.discrete, alone.discrete)
        np.testing.assert_allclose(actions.continuous, alone.continuous, rtol=1e-5, atol=1e-6)
        assert actions.continuous is not None
        assert actions.continuous.dtype == np.float32
        assert np.abs(actions.continuous + 0.2).max() <= np.float32(0.7) + 1e-6


def test_agent_whose_algorithm_cannot_act_as_its_spec_says_is_refused() -> None:
    """An actor ends with the reason instead of starting again and again."""
    with pytest.raises(ConfigError, match=r"learner\.algorithm = 'dqn': .* take hybrid"):
        PolicyGroup(AGENTS, HYBRID_SPEC, LearnerConfig(network=NETWORK), ENVS)


def test_group_is_greedy_until_it_is_told_to_explore() -> None:
    """Noisy layers draw in actors and are silent in evaluation."""
    assert (actions_of(make_noisy_group(None), 5) == 2).all()
    explored = actions_of(make_noisy_group(1), 20)
    assert set(explored.flatten()) == {0, 1, 2, 3}
    assert (explored[:, 0] != explored[:, 1]).any()  # agents
    assert (explored[:, :, 0] != explored[:, :, 1]).any()  # environments


def test_group_with_the_same_noise_acts_the_same() -> None:
    """A generator of one seed gives one sequence of actions."""
    first, second, other = (actions_of(make_noisy_group(seed), 10) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()
