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

from shared.algorithms import build_network
from shared.config import Config, LearnerConfig
from shared.errors import SpecMismatch
from shared.layout import Array, Arrays
from shared.networks import PolicyNetwork, draw_noise_from, flat_input, stack_networks
from shared.specs import AgentSpec, DType
from worlds.base import AgentActions

_TORCH = {dtype: torch.from_numpy(np.zeros(0, dtype.numpy)).dtype for dtype in DType}
_SHAPES = {"algorithm", "network", "hybrid", "options"}  # what of a learner's config a network may depend on


@dataclass(slots=True)
class PolicyGroup:
    """Agents whose networks have one shape."""

    agents: tuple[str, ...]
    spec: AgentSpec
    learner: LearnerConfig
    envs: int
    versions: npt.NDArray[np.int64] = field(init=False)  # [agents]; 0: no weights yet
    stacks: Array = field(init=False)  # [agents, envs, stack, *observation], newest last
    network: PolicyNetwork = field(init=False)
    _inputs: torch.Tensor = field(init=False)  # the same memory as `stacks`

    def __post_init__(self) -> None:
        self.versions = np.zeros(len(self.agents), np.int64)
        shape = (len(self.agents), self.envs, self.spec.stack, *self.spec.observation.shape)
        # Memory of torch's is aligned: matrix products of the same numbers are then the same to the last bit.
        self._inputs = torch.zeros(shape, dtype=_TORCH[self.spec.observation.dtype])
        self.stacks = self._inputs.numpy()
        networks = [build_network(self.spec, self.learner) for _ in self.agents]
        self.network = stack_networks(networks, build_network(self.spec, self.learner)).eval()

    def explore(self, noise: torch.Generator) -> None:
        """From now on noisy layers have noise, drawn from here; without this call they have none."""
        draw_noise_from(self.network.train(), noise)

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
    def best_actions(self) -> list[AgentActions]:
        """The greedy actions of each agent in all slots, as its noisy layers see it if they explore."""
        chosen = self.network.act(flat_input(self._inputs, self.spec))
        return [
            AgentActions(
                discrete=None if chosen.discrete is None else chosen.discrete[place].numpy(),
                continuous=None if chosen.continuous is None else chosen.continuous[place].numpy(),
            )
            for place in range(len(self.agents))
        ]


def group_agents(config: Config, specs: Mapping[str, AgentSpec], envs: int) -> list[PolicyGroup]:
    """Agents with the same spec, algorithm and network share a group, unless each is to act by itself."""
    members: dict[tuple[str, ...], list[str]] = {}
    for agent, spec in specs.items():
        learner = config.learner_for(agent)
        shape = (spec.model_dump_json(), learner.model_dump_json(include=_SHAPES))
        alone = () if config.parallel.parallel_actions else (agent,)
        members.setdefault((*shape, *alone), []).append(agent)
    return [
        PolicyGroup(tuple(agents), specs[agents[0]], config.learner_for(agents[0]), envs)
        for agents in members.values()
    ]
