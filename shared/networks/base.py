"""What every network that acts is: from an observation stack to the greedy actions.

Every layer also works with weights that carry a leading agent dimension, so that an actor runs the networks
of all agents of one shape as a single batched pass (`stack_networks`): three agents cost one call, not three.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from shared.config import LearnerConfig, NetworkConfig
from shared.specs import AgentSpec, DType

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Actions as tensors; a part that the agent's spec does not have is None."""

    discrete: Tensor | None = None  # int64 [...]
    continuous: Tensor | None = None  # float32 [..., size]


class PolicyNetwork(nn.Module, ABC):
    """A network that can act. Algorithms name theirs; learners and actors build it from spec and config."""

    def __init__(self, spec: AgentSpec, config: NetworkConfig) -> None:
        super().__init__()
        self.spec, self.config = spec, config

    @classmethod
    def build(cls, spec: AgentSpec, config: LearnerConfig) -> Self:
        """The network of an agent that learns as `config` says; one may need to know more of it than this."""
        return cls(spec, config.network)

    @abstractmethod
    def act(self, x: Tensor) -> Chosen:
        """The greedy actions for inputs [..., inputs].

        In eval mode a pure function of the inputs and the weights. In training mode noisy layers draw their
        noise in each call, so the same inputs may give other actions: that is how such an agent explores.
        """

    @property
    def inputs(self) -> int:
        return self.spec.stack * math.prod(self.spec.observation.shape)


def flat_input(observations: Tensor, spec: AgentSpec) -> Tensor:
    """[..., stack, *shape] of the observation's type to float32 [..., inputs]."""
    inputs = spec.stack * math.prod(spec.observation.shape)
    leading = observations.shape[: observations.dim() - 1 - len(spec.observation.shape)]
    flat = observations.reshape(*leading, inputs)
    return flat if spec.observation.dtype == DType.FLOAT32 else flat.to(torch.float32)


def stack_networks(networks: Sequence[N], template: N) -> N:
    """Turns `template` into one network whose parameters are those of `networks`, side by side."""
    sources = [dict(network.named_parameters()) for network in networks]
    for module_name, module in template.named_modules():
        for name in list(module._parameters):
            full = f"{module_name}.{name}" if module_name else name
            stacked = torch.stack([source[full].detach() for source in sources])
            module._parameters[name] = nn.Parameter(stacked, requires_grad=False)
    return template
