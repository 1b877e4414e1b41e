from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared.config import NetworkConfig
from shared.networks import Linear, NoisyLinear, QNetwork, draw_noise_from, output_layer, stack_networks
from shared.specs import AgentSpec, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(3), stack=2, discrete=Discrete(n=4))


def make_layer(seed: int = 0, inputs: int = 3, outputs: int = 2, alike: int | None = None) -> NoisyLinear:
    """A layer whose noise is no constant, as after some training."""
    torch.manual_seed(seed)
    layer = NoisyLinear(inputs, outputs, sigma=0.5, alike=alike)
    with torch.no_grad():
        layer.weight_sigma.uniform_(-0.5, 0.5)
        layer.bias_sigma.uniform_(-0.5, 0.5)
    layer.generator = torch.Generator().manual_seed(seed)
    return layer


def outputs_of(layer: NoisyLinear, x: Tensor, rows: int) -> Tensor:
    with torch.no_grad():
        return layer(x.expand(rows, -1))


# --- what the noise is ------------------------------------------------------------------------------------


def test_mean_of_many_outputs_is_the_output_without_noise() -> None:
    """The noise has mean zero."""
    layer, x = make_layer(), torch.tensor([1.0, -2.0, 0.5])
    noisy = outputs_of(layer, x, 40_000)
    plain = layer.eval()(x)
    error = noisy.std(0) / math.sqrt(len(noisy))
    assert ((noisy.mean(0) - plain).abs() < 4 * error).all()
    assert (noisy.std(0) > 0.1).all()


def test_spread_of_many_outputs_is_that_of_factorised_noise() -> None:
    """f(e) = sign(e) sqrt|e| has variance E|e| = sqrt(2 / pi), for outputs and for inputs."""
    layer, x = make_layer(), torch.tensor([1.0, -2.0, 0.5])
    size = math.sqrt(2 / math.pi)
    expected = size * (size * (layer.weight_sigma**2 * x**2).sum(1) + layer.bias_sigma**2)
    found = outputs_of(layer, x, 200_000).var(0)
    torch.testing.assert_close(found, expected.detach(), rtol=0.03, atol=0.0)


def test_output_is_that_of_the_noisy_weights_which_are_never_made() -> None:
    """W + S * f(e_out) f(e_in)^T and b + s * f(e_out), written out for one row."""
    layer, x = make_layer(), torch.randn(3)
    noise_in, noise_out = torch.randn(3), torch.randn(2)
    weight = layer.weight + layer.weight_sigma * torch.outer(noise_out, noise_in)
    bias = layer.bias + layer.bias_sigma * noise_out
    torch.testing.assert_close(layer.with_noise(x, noise_in, noise_out), weight @ x + bias)


def test_new_layer_has_the_noise_that_the_config_says() -> None:
    """sigma over the square root of the inputs, for weights and biases."""
    layer = output_layer(16, 5, NetworkConfig(noisy=True, noisy_sigma=0.8))
    assert isinstance(layer, NoisyLinear)
    assert torch.equal(layer.weight_sigma, torch.full((5, 16), 0.2))
    assert torch.equal(layer.bias_sigma, torch.full((5,), 0.2))
    assert type(output_layer(16, 5, NetworkConfig())) is Linear


def test_eval_mode_has_no_noise() -> None:
    """Greedy play: the same inputs give the same outputs, those of a plain layer."""
    layer, x = make_layer().eval(), torch.randn(7, 3)
    plain = Linear(3, layer.out_features)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer(x), plain(x))


def test_weights_and_their_noise_both_get_gradients() -> None:
    """How much to explore is learned."""
    layer = make_layer()
    layer(torch.randn(5, 3)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).all(), name


# --- whose noise it is ------------------------------------------------------------------------------------


def test_each_row_and_each_call_has_noise_of_its_own() -> None:
    """Environments of one actor explore in different directions, and differently the next turn."""
    layer, x = make_layer(), torch.randn(3)
    drawn = torch.cat([outputs_of(layer, x, 10), outputs_of(layer, x, 10)])
    assert len(drawn[:, 0].unique()) == 20
    assert len(drawn[:, 1].unique()) == 20


def test_rows_along_the_alike_dimension_share_their_noise() -> None:
    """The quantiles of one observation belong to one drawn network; other observations to others."""
    layer = make_layer(alike=-2)
    x = torch.randn(3).expand(4, 6, 3)
    y = layer(x)
    torch.testing.assert_close(y, y[:, :1].expand(4, 6, 2))
    assert len(y[:, 0, 0].unique()) == 4


def test_noise_comes_from_the_generator_alone() -> None:
    """The same seed gives the same noise, and torch's own random numbers are not touched."""
    x, before = torch.randn(4, 3), torch.get_rng_state()
    layer = make_layer()
    torch.set_rng_state(before)
    first = layer(x)
    assert torch.equal(torch.get_rng_state(), before)
    layer.generator = torch.Generator().manual_seed(0)
    assert torch.equal(layer(x), first)
    layer.generator = None
    layer(x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_pass_leaves_nothing_behind_in_the_layer() -> None:
    """Threads may be in one layer at the same time, and noise is no part of what is published."""
    layer = make_layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    attributes = set(vars(layer))
    layer(torch.randn(5, 3))
    assert set(before) == {"weight", "bias", "weight_sigma", "bias_sigma"}
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert set(vars(layer)) == attributes
    assert not list(layer.buffers())


# --- several agents side by side --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(5,), (5, 4)])
def test_stacked_layer_gives_what_each_single_one_gives_for_the_same_noise(rows: tuple[int, ...]) -> None:
    """Weights [agents, out, in]: one batched pass is every agent's own layer."""
    singles = [make_layer(seed) for seed in range(3)]
    stacked = stack_networks(singles, make_layer())
    x, noise_in = torch.randn(3, *rows, 3), torch.randn(3, *rows, 3)
    noise_out = torch.randn(3, *rows, 2)
    expected = torch.stack(
        [layer.with_noise(x[i], noise_in[i], noise_out[i]) for i, layer in enumerate(singles)]
    )
    torch.testing.assert_close(stacked.with_noise(x, noise_in, noise_out), expected)
    plain = torch.stack([layer.eval()(x[i]) for i, layer in enumerate(singles)])
    torch.testing.assert_close(stacked.eval()(x), plain)


def test_stacked_layer_draws_noise_for_each_agent() -> None:
    """Agents with the same weights and inputs still explore each on its own."""
    single = make_layer()
    y = stack_networks([single, single], make_layer())(torch.ones(2, 6, 3))
    assert len(y[..., 0].unique()) == 12


def test_noisy_q_network_draws_from_the_generator_it_was_given() -> None:
    """`draw_noise_from` reaches the head; the same seed gives the same values."""
    network, x = QNetwork(SPEC, NetworkConfig(hidden=(8,), noisy=True)), torch.randn(5, 6)
    values = []
    for seed in (1, 1, 2):
        draw_noise_from(network, torch.Generator().manual_seed(seed))
        values.append(network(x))
    assert torch.equal(values[0], values[1])
    assert (values[0] != values[2]).all()
