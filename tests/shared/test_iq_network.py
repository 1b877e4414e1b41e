from __future__ import annotations

import math

import pytest
import torch

from shared.config import NetworkConfig
from shared.networks import IQNetwork, stack_networks
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(3), stack=2, discrete=Discrete(n=4))


def make_network(seed: int = 0, *, dueling: bool = True, noisy: bool = False) -> IQNetwork:
    torch.manual_seed(seed)
    config = NetworkConfig(hidden=(16, 8), dueling=dueling, noisy=noisy, cosines=5, act_quantiles=6)
    return IQNetwork(SPEC, config)


def test_quantile_values_are_those_of_the_equations() -> None:
    """Embedding, product and heads, one observation, quantile and feature at a time."""
    network, x, taus = make_network(dueling=False), torch.randn(2, 6), torch.rand(2, 3)
    found = network(x, taus)
    assert found.shape == (2, 3, 4)
    for row in range(2):
        features = x[row]
        for layer in network.body:
            features = torch.relu(layer.weight @ features + layer.bias)
        for place in range(3):
            cosines = torch.tensor([math.cos(math.pi * i * float(taus[row, place])) for i in range(5)])
            phi = torch.relu(network.embedding.weight @ cosines + network.embedding.bias)
            expected = network.head.weight @ (features * phi) + network.head.bias
            torch.testing.assert_close(found[row, place], expected)


def test_dueling_quantile_values_average_to_the_state_value() -> None:
    """Q = V + A - mean(A) in each quantile: over the actions the advantages cancel."""
    network, x, taus = make_network(), torch.randn(2, 6), torch.rand(2, 3)
    seen = []
    network.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    values = network(x, taus)
    torch.testing.assert_close(values.mean(-1), seen[0][..., 0])
    torch.testing.assert_close(values[..., 0] - values[..., 1], seen[0][..., 1] - seen[0][..., 2])


@pytest.mark.parametrize("dueling", [True, False])
def test_action_values_are_the_mean_over_the_fixed_fractions(dueling: bool) -> None:
    """Averaging before the linear head is averaging the quantile values at (i + 0.5) / K."""
    network, x = make_network(dueling=dueling), torch.randn(7, 6)
    midpoints = torch.tensor([(i + 0.5) / 6 for i in range(6)]).expand(7, 6)
    expected = network(x, midpoints).mean(-2)
    torch.testing.assert_close(network.action_values(network.body(x)), expected)
    chosen = network.act(x)
    assert chosen.discrete is not None
    assert torch.equal(chosen.discrete, expected.argmax(-1))


def test_acting_draws_nothing_unless_it_is_noisy_and_training() -> None:
    """Greedy actions are a function of the inputs and the weights."""
    x = torch.randn(50, 6)
    for noisy, training, same in ((False, True, True), (True, False, True), (True, True, False)):
        network = make_network(noisy=noisy).train(training)
        first, second = (network.action_values(network.body(x)) for _ in range(2))
        assert torch.equal(first, second) is same


def test_quantiles_of_a_noisy_row_belong_to_one_network() -> None:
    """At one fraction, asked for many times, a row has one value: its noise is drawn once."""
    network = make_network(noisy=True)
    values = network(torch.randn(6).expand(5, 6), torch.full((5, 9), 0.3))
    torch.testing.assert_close(values, values[:, :1].expand(5, 9, 4))
    assert len(values[:, 0, 0].unique()) == 5


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dueling", [True, False])
def test_stacked_network_gives_what_each_single_one_gives(dueling: bool, noisy: bool) -> None:
    """One batched pass over all agents is every agent's own network, for quantiles and for acting."""
    singles = [make_network(seed, dueling=dueling, noisy=noisy).eval() for seed in range(3)]
    stacked = stack_networks(singles, make_network(9, dueling=dueling, noisy=noisy).eval())
    x, taus = torch.randn(3, 5, 6), torch.rand(3, 5, 7)
    with torch.no_grad():
        expected = torch.stack([network(x[i], taus[i]) for i, network in enumerate(singles)])
        torch.testing.assert_close(stacked(x, taus), expected)
        values = torch.stack([network.action_values(network.body(x[i])) for i, network in enumerate(singles)])
        torch.testing.assert_close(stacked.action_values(stacked.body(x)), values)
        assert stacked.act(x).discrete.shape == (3, 5)


def test_state_of_the_network_is_its_weights_alone() -> None:
    """Constants are not published: they follow from the config."""
    assert set(make_network().state_dict()) == {
        *(f"body.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")),
        *(f"{layer}.{part}" for layer in ("embedding", "head") for part in ("weight", "bias")),
    }


def test_network_for_other_than_one_discrete_action_is_refused() -> None:
    """Values of actions need actions to choose from, and choose nothing else."""
    spec = AgentSpec(observation=vector_observation(2), continuous=Continuous(size=1))
    with pytest.raises(ValueError, match="needs a discrete action"):
        IQNetwork(spec, NetworkConfig())
    with pytest.raises(ValueError, match="take hybrid"):
        IQNetwork(spec.model_copy(update={"discrete": Discrete(n=2)}), NetworkConfig())
