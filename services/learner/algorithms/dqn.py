"""DQN: double (van Hasselt 2016), dueling (Wang 2016), n-step, prioritized (Schaul 2016). Read top to bottom.

    y      = scale * R + discount * Q_target(s', a*),   a* = argmax Q_online(s', .)  when double
    td     = y - Q_online(s, a)
    loss   = mean( weight * huber(td) )
    priority of a row = |td|

R is the n-step return of the data and discount its gamma^k, already 0 where the episode terminated: replay
computes both, row by row, so the n here is always the n of the data.

Next: services/param_server/service.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.learner.adam import Adam
from services.learner.training import (
    TargetNetwork,
    Tensors,
    UpdateReport,
    clip_gradients,
    named_state,
    to_tensors,
    under_prefix,
)
from shared.config import LearnerConfig
from shared.layout import Arrays
from shared.logs import get_logger
from shared.networks import QNetwork, flat_input
from shared.specs import AgentSpec

log = get_logger()

FIGURES_EVERY = 25  # updates: each figure costs as much as a small layer


class DQN:
    """One agent's networks and optimizer, and the update that trains them."""

    def __init__(self, spec: AgentSpec, config: LearnerConfig, device: torch.device, seed: int) -> None:
        self.spec, self.config, self.device = spec, config, device
        self.updates = 0
        self.skipped = 0  # updates whose loss was not finite
        torch.manual_seed(seed)
        self.online = QNetwork(spec, config.network).to(device)
        self.target = TargetNetwork(self.online, QNetwork(spec, config.network).to(device), config.target)
        self.parameters = list(self.online.parameters())
        self.optimizer = Adam(dict(self.online.named_parameters()), lr=config.lr, epsilon=config.adam_epsilon)

    def update(self, arrays: Arrays) -> UpdateReport | None:
        """One gradient step on a batch. None: the loss was not finite, nothing was changed."""
        batch = to_tensors(arrays, self.device)
        observation = flat_input(batch["observation"], self.spec)  # [batch, inputs]
        next_observation = flat_input(batch["next_observation"], self.spec)
        targets = self._targets(batch["return"], batch["discount"], next_observation)

        values = self.online(observation)  # [batch, actions]
        chosen = values.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        td = targets - chosen
        loss = (batch["weight"] * functional.huber_loss(chosen, targets, reduction="none")).mean()

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            self._skip("loss", loss_value)
            return None
        gradients = torch.autograd.grad(loss, self.parameters)
        grad_norm = clip_gradients(gradients, self.config.clip_norm)
        if not math.isfinite(grad_norm):
            self._skip("gradient norm", grad_norm)
            return None
        self._step(gradients)
        return UpdateReport(
            priorities=td.detach().abs().cpu().numpy(),
            loss=loss_value,
            grad_norm=grad_norm,
            figures=self._figures(td.detach(), values.detach(), next_observation),
        )

    def _step(self, gradients: Sequence[Tensor]) -> None:
        self.optimizer.step(gradients)
        self.updates += 1
        self.target.follow(self.updates)

    def _skip(self, what: str, value: float) -> None:
        self.skipped += 1
        log.warning("not finite; update skipped", what=what, value=value, skipped=self.skipped)

    @torch.no_grad()
    def _targets(self, returns: Tensor, discounts: Tensor, next_observation: Tensor) -> Tensor:
        target_values: Tensor = self.target.network(next_observation)
        if self.config.double:
            best = self.online(next_observation).argmax(1, keepdim=True)
            bootstrap = target_values.gather(1, best).squeeze(1)
        else:
            bootstrap = target_values.amax(1)
        return self.config.reward_scale * returns + discounts * bootstrap

    def _figures(self, td: Tensor, values: Tensor, next_observation: Tensor) -> dict[str, float]:
        if self.updates % FIGURES_EVERY:
            return {}
        with torch.no_grad():
            target_size = float(self.target.network(next_observation).abs().mean())
        self.target.watch(float(values.abs().mean()), target_size)
        return {
            "td": float(td.abs().mean()),
            "q_mean": float(values.mean()),
            "q_max": float(values.max()),
        }

    # --- what leaves the learner ------------------------------------------------------------------------

    def policy(self) -> Tensors:
        """What actors need: the online network. Copies, because training goes on in place."""
        return {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self.online.state_dict().items()
        }

    def load_policy(self, tensors: Tensors) -> None:
        """Starts from published weights alone: the target is copied, the optimizer fresh."""
        self.online.load_state_dict(tensors)
        self.target.copy()

    def checkpoint(self) -> Tensors:
        """Everything that a resumed learner needs to go on as if it had not stopped."""
        tensors = named_state("online", self.online.state_dict())
        tensors |= named_state("target", self.target.network.state_dict())
        tensors |= named_state("adam", self.optimizer.state())
        tensors["rng"] = torch.get_rng_state()
        tensors["counters"] = torch.tensor([self.updates, self.skipped, self.target.copies])
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def restore(self, tensors: Tensors) -> None:
        """The inverse of `checkpoint`."""
        self.online.load_state_dict(under_prefix("online", tensors))
        self.target.network.load_state_dict(under_prefix("target", tensors))
        self.optimizer.load(under_prefix("adam", tensors))
        torch.set_rng_state(tensors["rng"])
        self.updates, self.skipped, self.target.copies = (int(value) for value in tensors["counters"])
