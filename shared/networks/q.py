"""Action values: the network of DQN."""

from __future__ import annotations

from torch import Tensor

from shared.config import NetworkConfig
from shared.networks.base import Chosen, PolicyNetwork
from shared.networks.layers import Body, output_layer
from shared.specs import AgentSpec


class QNetwork(PolicyNetwork):
    """Observation stack to action values, dueling by default: Q = V + A - mean(A) (Wang et al. 2016)."""

    def __init__(self, spec: AgentSpec, config: NetworkConfig) -> None:
        super().__init__(spec, config)
        if spec.discrete is None:
            raise ValueError("a Q network needs a discrete action")
        if spec.continuous is not None:
            raise ValueError("a Q network chooses a discrete action alone; for both kinds take hybrid")
        self.dueling = config.dueling
        self.body = Body([self.inputs, *config.hidden])
        # One layer for both heads: column 0 is the state's value, the others the advantages.
        self.head = output_layer(config.hidden[-1], spec.discrete.n + (1 if config.dueling else 0), config)

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., actions]
        heads: Tensor = self.head(self.body(x))
        return dueling_values(heads) if self.dueling else heads

    def act(self, x: Tensor) -> Chosen:
        return Chosen(discrete=self(x).argmax(-1))


def dueling_values(heads: Tensor) -> Tensor:
    """[..., 1 + actions] with the state's value first -> [..., actions]: Q = V + A - mean(A)."""
    value, advantage = heads[..., :1], heads[..., 1:]
    return value + advantage - advantage.mean(-1, keepdim=True)
