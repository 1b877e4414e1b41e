"""Layers whose weights may carry a leading agent dimension: the networks of several agents in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer: weight [out, in] for one agent, or [agents, out, in] for several side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., in] with weight [out, in], or x [agents, batch, in] with weight [agents, out, in]."""
    if weight.dim() == 2:
        return nn.functional.linear(x, weight, bias)
    # [agents, batch, in] x [agents, in, out] + [agents, 1, out]
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
