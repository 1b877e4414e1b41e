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

import torch
from torch import Tensor
from torch.nn import functional

from services.learner.algorithms.base import Algorithm, Loss
from services.learner.training import Tensors
from shared.networks import QNetwork


class DQN(Algorithm):
    """Learns the values of discrete actions."""

    network = QNetwork

    def loss(self, batch: Tensors) -> Loss:
        with torch.no_grad():
            target_values: Tensor = self.target.network(batch["next_observation"])  # [batch, actions]
            bootstrap = self.bootstrap(target_values, batch["next_observation"])
            targets = self.config.reward_scale * batch["return"] + batch["discount"] * bootstrap

        values = self.online(batch["observation"])  # [batch, actions]
        chosen = values.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        huber = functional.huber_loss(chosen, targets, reduction="none")
        return Loss(
            value=(batch["weight"] * huber).mean(),
            priorities=(targets - chosen).detach().abs(),
            values=values.detach(),
            target_values=target_values,
        )

    def bootstrap(self, target_values: Tensor, next_observation: Tensor) -> Tensor:
        """The value [batch] of what comes next; a subclass may think otherwise of it."""
        if not self.config.double:
            return target_values.amax(1)
        best = self.online(next_observation).argmax(1, keepdim=True)
        return target_values.gather(1, best).squeeze(1)
