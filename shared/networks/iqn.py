"""Quantiles of the return: the network of IQN (Dabney et al. 2018).

    Z(s, a; tau) = head( body(s) * phi(tau) )_a
    phi(tau)     = relu( W c(tau) + b ),   c_i(tau) = cos(pi i tau),   i = 0, .. cosines - 1

The head is linear, so the mean over quantiles may be taken before it: acting, which wants only
Q(s, a) = mean of Z(s, a; tau), costs one pass of the head and not one for each quantile. All of
`network.hidden` is in the body, which sees each observation once, however many quantiles are asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.config import NetworkConfig
from shared.networks.base import Chosen, PolicyNetwork
from shared.networks.layers import Body, Linear, output_layer
from shared.networks.q import dueling_values
from shared.specs import AgentSpec


class IQNetwork(PolicyNetwork):
    """Observation stack and quantile fractions to quantile values; dueling and noisy as the config says."""

    frequencies: Tensor
    act_cosines: Tensor

    def __init__(self, spec: AgentSpec, config: NetworkConfig) -> None:
        super().__init__(spec, config)
        if spec.discrete is None:
            raise ValueError("a quantile network needs a discrete action")
        if spec.continuous is not None:
            raise ValueError("a quantile network chooses a discrete action alone; for both kinds take hybrid")
        self.dueling = config.dueling
        features = config.hidden[-1]
        self.body = Body([self.inputs, *config.hidden])
        self.embedding = Linear(config.cosines, features)
        outputs = spec.discrete.n + (1 if config.dueling else 0)
        # Noise is one for all quantiles of a row: they belong to one drawn network.
        self.head = output_layer(features, outputs, config, alike=-2)
        # Constants that follow the network to its device and are no part of its state.
        frequencies = math.pi * torch.arange(config.cosines, dtype=torch.float32)
        midpoints = (torch.arange(config.act_quantiles) + 0.5) / config.act_quantiles
        self.register_buffer("frequencies", frequencies, persistent=False)
        act_cosines = torch.cos(midpoints.unsqueeze(-1) * frequencies)  # [act_quantiles, cosines]
        self.register_buffer("act_cosines", act_cosines, persistent=False)

    def forward(self, x: Tensor, taus: Tensor) -> Tensor:
        """[..., inputs] and taus [..., quantiles] -> Z [..., quantiles, actions]."""
        return self.quantile_values(self.body(x), taus)

    def quantile_values(self, features: Tensor, taus: Tensor) -> Tensor:
        """Z [..., quantiles, actions] for what the body made of the inputs."""
        embedded = torch.relu(self.embedding(torch.cos(taus.unsqueeze(-1) * self.frequencies)))
        return self._heads(features.unsqueeze(-2) * embedded)

    def action_values(self, features: Tensor) -> Tensor:
        """Q [..., actions]: the mean of Z over `act_quantiles` fixed fractions, (i + 0.5) / act_quantiles."""
        agents = self.embedding.weight.shape[:-2]  # none, or one dimension when networks are stacked
        embedded = torch.relu(self.embedding(self.act_cosines.expand(*agents, *self.act_cosines.shape)))
        mean = embedded.mean(-2, keepdim=True)  # [(agents,) 1, features]
        return self._heads((features * mean).unsqueeze(-2)).squeeze(-2)

    def act(self, x: Tensor) -> Chosen:
        return Chosen(discrete=self.action_values(self.body(x)).argmax(-1))

    def _heads(self, features: Tensor) -> Tensor:  # [..., quantiles, features] -> [..., quantiles, actions]
        heads: Tensor = self.head(features)
        return dueling_values(heads) if self.dueling else heads
