from __future__ import annotations

import pytest
import torch

from shared.config import NetworkConfig
from shared.networks import HybridNetwork, QNetwork, flat_input, stack_networks
from shared.specs import AgentSpec, Column, Continuous, Discrete, DType, vector_observation


def make_spec(dtype: DType = DType.FLOAT32, shape: tuple[int, ...] = (3,)) -> AgentSpec:
    observation = Column(name="observation", dtype=dtype, shape=shape, per="observation")
    return AgentSpec(observation=observation, stack=2, discrete=Discrete(n=4))


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("hidden", [(8,), (16, 8)])
def test_stacked_network_gives_what_each_single_one_gives(dueling: bool, hidden: tuple[int, ...]) -> None:
    """One batched pass over all agents is every agent's own network."""
    torch.manual_seed(0)
    spec, config = make_spec(), NetworkConfig(hidden=hidden, dueling=dueling)
    singles = [QNetwork(spec, config) for _ in range(3)]
    stacked = stack_networks(singles, QNetwork(spec, config))
    x = torch.randn(3, 5, 6)
    with torch.no_grad():
        expected = torch.stack([network(x[place]) for place, network in enumerate(singles)])
        torch.testing.assert_close(stacked(x), expected)


def test_stacked_network_is_a_copy_that_is_not_trained() -> None:
    """Changing a single network later leaves the stacked one as it was."""
    spec, config = make_spec(), NetworkConfig(hidden=(4,))
    single = QNetwork(spec, config)
    stacked = stack_networks([single, single], QNetwork(spec, config))
    before = {name: value.clone() for name, value in stacked.named_parameters()}
    with torch.no_grad():
        for parameter in single.parameters():
            parameter.add_(1.0)
    for name, value in stacked.named_parameters():
        assert torch.equal(value, before[name])
        assert not value.requires_grad
        assert value.shape[0] == 2


def test_dueling_values_average_to_the_state_value() -> None:
    """Q = V + A - mean(A): over the actions the advantages cancel."""
    network = QNetwork(make_spec(), NetworkConfig(hidden=(8,), dueling=True))
    x = torch.randn(5, 6)
    heads = network.head(torch.relu(network.body[0](x)))
    values = network(x)
    assert values.shape == (5, 4)
    torch.testing.assert_close(values.mean(-1), heads[:, 0])
    torch.testing.assert_close(
        values - values.mean(-1, keepdim=True), heads[:, 1:] - heads[:, 1:].mean(-1, keepdim=True)
    )


def test_plain_network_has_one_output_for_each_action() -> None:
    """Without dueling there is no column for the state's value."""
    assert QNetwork(make_spec(), NetworkConfig(hidden=(8,), dueling=False)).head.weight.shape == (4, 8)


def test_network_without_a_discrete_action_is_refused() -> None:
    """Values of actions need actions to choose from."""
    spec = AgentSpec(observation=vector_observation(2), continuous=Continuous(size=1))
    with pytest.raises(ValueError, match="discrete"):
        QNetwork(spec, NetworkConfig())


def test_flat_input_of_bytes_and_several_dimensions_is_flat_floats() -> None:
    """[agents, batch, stack, *shape] of any type becomes float32 [agents, batch, inputs] in order."""
    spec = make_spec(DType.UINT8, (2, 3))
    x = torch.arange(4 * 5 * 12, dtype=torch.uint8).reshape(4, 5, 2, 2, 3)
    flat = flat_input(x, spec)
    assert (flat.shape, flat.dtype) == ((4, 5, 12), torch.float32)
    assert torch.equal(flat[1, 2], x[1, 2].reshape(-1).float())


# --- hybrid -----------------------------------------------------------------------------------------------

HYBRID_SPEC = make_spec().model_copy(update={"continuous": Continuous(size=2, low=-3.0, high=1.0)})


@pytest.mark.parametrize("continuous", ["imitate", "improve"])
@pytest.mark.parametrize("discrete", [True, False])
def test_stacked_hybrid_network_gives_what_each_single_one_gives(continuous: str, discrete: bool) -> None:
    """One batched pass over all agents is every agent's own choice and control."""
    torch.manual_seed(0)
    spec = HYBRID_SPEC if discrete else HYBRID_SPEC.model_copy(update={"discrete": None})
    singles = [HybridNetwork(spec, NetworkConfig(hidden=(16, 8)), continuous) for _ in range(4)]  # type: ignore[arg-type]
    stacked = stack_networks(singles[:3], singles[3])
    x = torch.randn(3, 5, 6)
    with torch.no_grad():
        together = stacked.act(x)
        for place, network in enumerate(singles[:3]):
            alone = network.act(x[place])
            assert together.continuous is not None
            torch.testing.assert_close(together.continuous[place], alone.continuous)
            assert (together.discrete is None) == (alone.discrete is None) == (not discrete)
            if together.discrete is not None:
                assert torch.equal(together.discrete[place], alone.discrete)


def test_hybrid_control_spans_the_range_of_the_spec_and_back() -> None:
    """-1 is low, 1 is high, in between a line; however large the weights, the bounds hold."""
    network = HybridNetwork(HYBRID_SPEC, NetworkConfig(hidden=(4,)))
    bounds = torch.tensor([-3.0, -1.0, 0.0, 1.0])
    torch.testing.assert_close(network.to_control(bounds), torch.tensor([-1.0, 0.0, 0.5, 1.0]))
    with torch.no_grad():
        network.control_head.weight.zero_()
        network.control_head.bias.copy_(torch.tensor([100.0, -100.0]))
        assert network.act(torch.ones(1, 6)).continuous.tolist() == [[1.0, -3.0]]
        network.control_head.bias.copy_(torch.tensor([0.0, 0.5]).atanh())
        chosen = network.act(torch.ones(1, 6)).continuous
    torch.testing.assert_close(chosen, torch.tensor([[-1.0, 0.0]]))


def test_hybrid_choice_is_the_best_one_at_the_own_control() -> None:
    """Improve: the discrete action is chosen for the control that goes with it."""
    torch.manual_seed(1)
    network, x = HybridNetwork(HYBRID_SPEC, NetworkConfig(hidden=(16,))), torch.randn(64, 6)
    with torch.no_grad():
        chosen = network.act(x)
        values = network.values(x, network.to_control(chosen.continuous))
        assert torch.equal(chosen.discrete, values.argmax(-1))
        elsewhere = network.values(x, -torch.ones(64, 2)).argmax(-1)
    assert not torch.equal(chosen.discrete, elsewhere)


def test_frozen_values_are_the_same_values_with_a_gradient_for_the_control_alone() -> None:
    """What climbs a critic must not bend it."""
    network, x = HybridNetwork(HYBRID_SPEC, NetworkConfig(hidden=(8,))), torch.randn(3, 6)
    control = torch.zeros(3, 2, requires_grad=True)
    frozen = network.values(x, control, frozen=True)
    assert torch.equal(frozen, network.values(x, control))
    frozen.sum().backward()
    assert control.grad is not None
    assert control.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in network.parameters())
