"""Layers whose weights may carry a leading agent dimension: the networks of several agents in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shared.config import NetworkConfig
from shared.networks import products


class Linear(nn.Linear):
    """A linear layer: weight [out, in] for one agent, or [agents, out, in] for several side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class NoisyLinear(Linear):
    """A linear layer that explores: its weights are noisy, and how much is learned (Fortunato et al. 2018).

        y = W x + b + f(e_out) * (S (f(e_in) * x) + s),   f(e) = sign(e) sqrt(|e|),   e ~ N(0, 1)

    This is their factorised noise, W + S * f(e_out) f(e_in)^T, without ever making that matrix: so every row
    of a batch and every environment of an actor has noise of its own. Each call draws anew: two passes of a
    network, or a network and its target, never share noise. Nothing is kept, so several threads may be in
    here. In eval mode there is no noise.
    """

    def __init__(self, inputs: int, outputs: int, sigma: float, alike: int | None = None) -> None:
        """`alike`: a dimension of the inputs, from behind, along which all rows have the same noise."""
        super().__init__(inputs, outputs)
        start = sigma / math.sqrt(inputs)
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), start))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), start))
        self.alike = alike
        self.generator: torch.Generator | None = None  # None: torch's own; `draw_noise_from` sets it

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rows = list(x.shape[:-1])
        if self.alike is not None:
            rows[self.alike + 1] = 1
        return self.with_noise(x, self._draw(x, *rows, x.shape[-1]), self._draw(x, *rows, self.out_features))

    def with_noise(self, x: Tensor, noise_in: Tensor, noise_out: Tensor) -> Tensor:
        """The output for given f(e_in) [..., in] and f(e_out) [..., out]."""
        noisy = linear(noise_in * x, self.weight_sigma, self.bias_sigma)
        return torch.addcmul(linear(x, self.weight, self.bias), noise_out, noisy)

    def _draw(self, like: Tensor, *shape: int) -> Tensor:
        noise = torch.randn(shape, generator=self.generator, device=like.device, dtype=like.dtype)
        return noise.sign() * noise.abs().sqrt_()


class Body(nn.ModuleList):
    """From inputs to features: linear layers, each with a relu behind it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(Linear(inputs, outputs) for inputs, outputs in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.relu(layer(x))
        return x


def output_layer(inputs: int, outputs: int, config: NetworkConfig, alike: int | None = None) -> Linear:
    """A layer behind the body: noisy if the config says so."""
    if config.noisy:
        return NoisyLinear(inputs, outputs, config.noisy_sigma, alike)
    return Linear(inputs, outputs)


def draw_noise_from(network: nn.Module, generator: torch.Generator) -> None:
    """Gives all noisy layers of a network one source of random numbers, on the network's device."""
    for module in network.modules():
        if isinstance(module, NoisyLinear):
            module.generator = generator


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., in] with weight [out, in], or x [agents, ..., in] with weight [agents, out, in]."""
    if weight.dim() == 2:
        return products.linear(x, weight, bias)
    # [agents, rows, in] x [agents, in, out] + [agents, 1, out]
    rows = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, -2), weight.transpose(1, 2))
    return rows.view(*x.shape[:-1], -1)
