"""A discrete and a continuous action at once: the network of the hybrid algorithm.

Inside, the continuous action is a *control* u in [-1, 1]: low + (u + 1) * (high - low) / 2 is what the world
is given. So the critic's input and the continuous loss have the same size whatever the world's range is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from shared.config import LearnerConfig, NetworkConfig
from shared.networks.base import Chosen, PolicyNetwork
from shared.networks.layers import Linear, linear
from shared.networks.q import dueling_values
from shared.specs import AgentSpec


class HybridNetwork(PolicyNetwork):
    """Values of the discrete actions and one control beside them, in one of two layouts.

        imitate:  x -> body -> head -> Q(s)       improve:  (x, u) -> body -> head -> Q(s, u)
                        `-> control_head -> u               x -> control_body -> control_head -> u

    u is the tanh of what `control_head` gives. An agent without a discrete action has a single value.
    """

    def __init__(
        self, spec: AgentSpec, config: NetworkConfig, continuous: Literal["imitate", "improve"] = "improve"
    ) -> None:
        super().__init__(spec, config)
        if spec.continuous is None:
            raise ValueError("a hybrid network needs a continuous action; for a discrete one alone take dqn")
        if config.noisy:
            raise ValueError("network.noisy: a hybrid network has no noisy layers; set it to false")
        self.low, self.high = spec.continuous.low, spec.continuous.high
        actions = 1 if spec.discrete is None else spec.discrete.n
        self.dueling = config.dueling and actions > 1
        self.improves = continuous == "improve"
        controls = spec.continuous.size
        self.body = _layers(self.inputs + (controls if self.improves else 0), config)
        self.head = Linear(config.hidden[-1], actions + (1 if self.dueling else 0))
        self.control_body = _layers(self.inputs, config) if self.improves else nn.ModuleList()
        self.control_head = Linear(config.hidden[-1], controls)

    @classmethod
    def build(cls, spec: AgentSpec, config: LearnerConfig) -> HybridNetwork:
        return cls(spec, config.network, config.hybrid.continuous)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [..., actions] at the network's own control, and that control before its tanh."""
        if self.improves:
            raw = self.raw_control(x)
            return self.values(x, torch.tanh(raw)), raw
        features = _through(self.body, x)
        return self._values_of(self.head(features)), self.control_head(features)

    def act(self, x: Tensor) -> Chosen:
        values, raw = self(x)
        half = (self.high - self.low) / 2
        continuous = (self.low + half * (torch.tanh(raw) + 1)).clamp(self.low, self.high)
        return Chosen(None if self.spec.discrete is None else values.argmax(-1), continuous)

    def to_control(self, continuous: Tensor) -> Tensor:
        """What the world was given, [low, high], as a control, [-1, 1]."""
        return (continuous - self.low) * (2 / (self.high - self.low)) - 1

    # --- improve: a critic, and what climbs it ----------------------------------------------------------

    def raw_control(self, x: Tensor) -> Tensor:
        """The control before its tanh, [..., controls]."""
        raw: Tensor = self.control_head(_through(self.control_body, x))
        return raw

    def values(self, x: Tensor, control: Tensor, frozen: bool = False) -> Tensor:
        """Q(s, u), [..., actions]. Frozen: gradients go through to the control, not to the weights.

        Detached weights, and not torch.func.functional_call, which swaps the module's own parameters for the
        time of the call: another gradient worker may be in it.
        """
        features = _through(self.body, torch.cat([x, control], -1), frozen)
        return self._values_of(_apply(self.head, features, frozen))

    def _values_of(self, heads: Tensor) -> Tensor:
        return dueling_values(heads) if self.dueling else heads


def _layers(inputs: int, config: NetworkConfig) -> nn.ModuleList:
    return nn.ModuleList(Linear(first, second) for first, second in pairwise([inputs, *config.hidden]))


def _through(layers: Iterable[nn.Module], x: Tensor, frozen: bool = False) -> Tensor:
    for layer in layers:
        assert isinstance(layer, Linear)
        x = torch.relu(_apply(layer, x, frozen))
    return x


def _apply(layer: Linear, x: Tensor, frozen: bool) -> Tensor:
    return linear(x, layer.weight.detach(), layer.bias.detach()) if frozen else layer(x)
