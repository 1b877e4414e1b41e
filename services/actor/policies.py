"""The networks that an actor plays with: all agents of one shape run as one batched pass.

A new version is copied in between two turns, whole, by the same thread that plays: an action is never chosen
with half an update, and choosing takes no lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from shared.config import Config, NetworkConfig
from shared.errors import SpecMismatch
from shared.layout import Array, Arrays
from shared.networks import QNetwork, flat_input, stack_networks
from shared.specs import AgentSpec


@dataclass(slots=True)
class PolicyGroup:
    """Agents whose networks have one shape."""

    agents: tuple[str, ...]
    spec: AgentSpec
    network_config: NetworkConfig
    envs: int
    versions: npt.NDArray[np.int64] = field(init=False)  # [agents]; 0: no weights yet
    stacks: Array = field(init=False)  # [agents, envs, stack, *observation], newest last
    network: torch.nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.versions = np.zeros(len(self.agents), np.int64)
        shape = (len(self.agents), self.envs, self.spec.stack, *self.spec.observation.shape)
        self.stacks = np.zeros(shape, self.spec.observation.dtype.numpy)
        networks = [QNetwork(self.spec, self.network_config) for _ in self.agents]
        self.network = stack_networks(networks, QNetwork(self.spec, self.network_config))

    def load(self, agent: str, version: int, tensors: Arrays) -> None:
        """Swaps in an agent's weights between two turns."""
        place = self.agents.index(agent)
        parameters = dict(self.network.named_parameters())
        if set(tensors) != set(parameters):
            raise SpecMismatch(
                f"weights of {agent}: tensors {sorted(tensors)}, expected {sorted(parameters)}"
            )
        for name, parameter in parameters.items():
            if tensors[name].shape != parameter.shape[1:]:
                raise SpecMismatch(
                    f"weights of {agent}: {name} is {tensors[name].shape}, expected {parameter.shape[1:]}"
                )
        for name, parameter in parameters.items():
            parameter[place].copy_(torch.from_numpy(np.array(tensors[name])))
        self.versions[place] = version

    def observe(self, observations: Sequence[Array]) -> None:
        """Pushes each agent's newest observation onto its stack."""
        if self.spec.stack > 1:
            self.stacks[:, :, :-1] = self.stacks[:, :, 1:]
        for place, observation in enumerate(observations):
            self.stacks[place, :, -1] = observation

    def forget(self, slots: npt.NDArray[np.bool_]) -> None:
        """Clears the stacks of these slots: a new episode begins with zeros before its first frame."""
        self.stacks[:, slots] = 0

    @torch.inference_mode()
    def best_actions(self) -> npt.NDArray[np.int64]:
        """The greedy actions [agents, envs]."""
        values = self.network(flat_input(torch.from_numpy(self.stacks), self.spec))
        actions: npt.NDArray[np.int64] = values.argmax(-1).numpy()
        return actions


def group_agents(config: Config, specs: Mapping[str, AgentSpec], envs: int) -> list[PolicyGroup]:
    """Agents with the same spec and network configuration share a group."""
    members: dict[tuple[str, str], list[str]] = {}
    for agent, spec in specs.items():
        network = config.learner_for(agent).network
        members.setdefault((spec.model_dump_json(), network.model_dump_json()), []).append(agent)
    return [
        PolicyGroup(tuple(agents), specs[agents[0]], config.learner_for(agents[0]).network, envs)
        for agents in members.values()
    ]
