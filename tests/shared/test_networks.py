from __future__ import annotations

import pytest
import torch

from shared.config import NetworkConfig
from shared.networks import QNetwork, flat_input, stack_networks
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
