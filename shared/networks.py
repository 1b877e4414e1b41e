"""The networks that agents act and learn with, built from a spec and a config wherever they run.

Every layer also works with weights that carry a leading agent dimension, so that an actor runs the networks
of all agents of one shape as a single batched pass (`stack_networks`): three agents cost one call, not three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shared.config import NetworkConfig
from shared.specs import AgentSpec, DType


class Linear(nn.Linear):
    """A linear layer: weight [out, in] for one agent, or [agents, out, in] for several side by side."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return nn.functional.linear(x, self.weight, self.bias)
        # [agents, batch, in] x [agents, in, out] + [agents, 1, out]
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.transpose(1, 2))


class QNetwork(nn.Module):
    """Observation stack to action values, dueling by default: Q = V + A - mean(A) (Wang et al. 2016)."""

    def __init__(self, spec: AgentSpec, config: NetworkConfig) -> None:
        super().__init__()
        if spec.discrete is None:
            raise ValueError("a Q network needs a discrete action")
        self.dueling = config.dueling
        sizes = [spec.stack * math.prod(spec.observation.shape), *config.hidden]
        self.body = nn.ModuleList(Linear(inputs, outputs) for inputs, outputs in pairwise(sizes))
        # One layer for both heads: column 0 is the state's value, the others the advantages.
        self.head = Linear(sizes[-1], spec.discrete.n + (1 if config.dueling else 0))

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., actions]
        for layer in self.body:
            x = torch.relu(layer(x))
        heads: Tensor = self.head(x)
        if not self.dueling:
            return heads
        value, advantage = heads[..., :1], heads[..., 1:]
        return value + advantage - advantage.mean(-1, keepdim=True)


def flat_input(observations: Tensor, spec: AgentSpec) -> Tensor:
    """[..., stack, *shape] of the observation's type to float32 [..., inputs]."""
    inputs = spec.stack * math.prod(spec.observation.shape)
    leading = observations.shape[: observations.dim() - 1 - len(spec.observation.shape)]
    flat = observations.reshape(*leading, inputs)
    return flat if spec.observation.dtype == DType.FLOAT32 else flat.to(torch.float32)


def stack_networks(networks: Sequence[nn.Module], template: nn.Module) -> nn.Module:
    """Turns `template` into one network whose parameters are those of `networks`, side by side."""
    sources = [dict(network.named_parameters()) for network in networks]
    for module_name, module in template.named_modules():
        for name in list(module._parameters):
            full = f"{module_name}.{name}" if module_name else name
            stacked = torch.stack([source[full].detach() for source in sources])
            module._parameters[name] = nn.Parameter(stacked, requires_grad=False)
    return template
