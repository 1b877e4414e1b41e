"""IQN: implicit quantile networks (Dabney 2018), double, dueling, n-step, prioritized. Read top to bottom.

    tau_i, tau'_j ~ U(0, 1),   i = 1 .. N,   j = 1 .. N'
    y_j    = scale * R + discount * Z_target(s', a*; tau'_j)
    a*     = argmax Q_online(s', .)  when double, else argmax Q_target(s', .);   Q = mean of Z over quantiles
    td_ij  = y_j - Z_online(s, a; tau_i)
    rho_ij = |tau_i - [td_ij < 0]| * huber_kappa(td_ij) / kappa
    loss   = mean over rows of  weight * sum over i of mean over j of rho_ij
    priority of a row = mean of |td_ij| over all N * N' pairs

huber_kappa(x) is x^2 / 2 up to |x| = kappa and kappa (|x| - kappa / 2) beyond. R, discount and weight come
with the data, row by row, as they do for DQN: the n of gamma^n is the n of the data, and where an episode
terminated the discount is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.learner.algorithms.base import Algorithm, Loss
from services.learner.training import Tensors
from shared.networks import IQNetwork


class IQN(Algorithm):
    """Learns the whole distribution of the return of each discrete action, as quantiles."""

    network = IQNetwork
    online: IQNetwork

    def loss(self, batch: Tensors) -> Loss:
        settings = self.config.iqn
        taus, target_taus = self.draw_taus(len(batch["return"]))
        with torch.no_grad():
            next_values, best = self._next(batch["next_observation"], target_taus)
            bootstrap = of_action(next_values, best)  # [batch, N']
            returns = self.config.reward_scale * batch["return"]
            targets = returns.unsqueeze(1) + batch["discount"].unsqueeze(1) * bootstrap

        values = self.online(batch["observation"], taus)  # [batch, N, actions]
        chosen = of_action(values, batch["action"])  # [batch, N]
        rho, td = quantile_huber(chosen, targets, taus, settings.kappa)  # [batch, N, N']
        return Loss(
            value=(batch["weight"] * rho.sum(1).mean(1)).mean(),
            priorities=td.abs().mean((1, 2)),
            values=values.detach().mean(1),
            target_values=next_values.mean(1),
        )

    def draw_taus(self, rows: int) -> tuple[Tensor, Tensor]:
        """[rows, N] and [rows, N'], drawn row by row: a batch in parts gets the same ones as in one piece."""
        counts = self.config.iqn.quantiles, self.config.iqn.target_quantiles
        drawn = torch.rand(rows, sum(counts), generator=self.generator, device=self.device)
        return drawn[:, : counts[0]], drawn[:, counts[0] :]

    def _next(self, observation: Tensor, taus: Tensor) -> tuple[Tensor, Tensor]:
        """The target's quantile values [batch, N', actions] of what comes next, and the best action there."""
        target = self.target.network
        assert isinstance(target, IQNetwork)
        features = target.body(observation)
        values = target.quantile_values(features, taus)
        if self.config.double:
            return values, self.online.action_values(self.online.body(observation)).argmax(1)
        return values, target.action_values(features).argmax(1)


def of_action(values: Tensor, action: Tensor) -> Tensor:
    """[batch, quantiles, actions] and [batch] -> [batch, quantiles]."""
    index = action.view(-1, 1, 1).expand(-1, values.shape[1], 1)
    return values.gather(2, index).squeeze(2)


def quantile_huber(values: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """rho, and td without a graph: [batch, N, N'] of values and taus [batch, N] and targets [batch, N']."""
    each_value = values.unsqueeze(2).expand(-1, -1, targets.shape[1])
    each_target = targets.unsqueeze(1).expand(-1, values.shape[1], -1)
    td = (each_target - each_value).detach()
    slope = (taus.unsqueeze(2) - (td < 0).to(td.dtype)).abs() / kappa
    return slope * functional.huber_loss(each_value, each_target, reduction="none", delta=kappa), td
