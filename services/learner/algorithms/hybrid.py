"""Hybrid: a discrete action by its value and a continuous one beside it. Read top to bottom.

u is the executed continuous action, mu(s) the network's, both in units of half its range, [-1, 1]; w the
importance weight; R and discount as in dqn.py.

imitate: the continuous head is drawn to what was executed, whatever it was worth. Right where someone good
plays; where play is random it learns the middle of the range.

    y      = scale * R + discount * Q_target(s')[a*]
    loss   = mean( w * ( huber(y - Q(s)[a]) + weight * mean_i (mu_i(s) - u_i)^2 ) )

improve: the critic learns what (a, u) is worth, and mu climbs it (Lillicrap 2016; Xiong 2018).

    y      = scale * R + discount * Q_target(s', mu_target(s'))[a*]
    critic = huber(y - Q(s, u)[a])                                        trains Q alone
    climb  = 0.9 * max_a + 0.1 * mean_a  of  Q(s, mu(s))[a]               trains mu alone, Q frozen
    flat   = mean_i max(0, |z_i| - 3)^2,   mu = tanh(z)
    loss   = mean( w * ( critic + weight * (flat - climb) ) )

a* is the best action at s', by the online network when double. The priority of a row is |y - Q[a]|. An agent
without a discrete action has one value: then improve is DDPG.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.learner.algorithms.base import Algorithm, Loss
from services.learner.training import Tensors
from shared.networks import HybridNetwork

# By the best action alone, a control would stand still wherever another action, which it does not matter to,
# looks better for now: a bow is not aimed while holding seems best.
SHARE_OF_ALL = 0.1
# Where tanh is flat no gradient comes back: past 0.995 of the range a control is pulled in again.
FLAT_FROM = 3.0


class Hybrid(Algorithm):
    """Learns the values of discrete actions, and a continuous action to go with them."""

    network = HybridNetwork

    def loss(self, batch: Tensors) -> Loss:
        return self._improve(batch) if self.config.hybrid.continuous == "improve" else self._imitate(batch)

    def _imitate(self, batch: Tensors) -> Loss:
        online, target = self._networks()
        with torch.no_grad():
            target_values, _ = target(batch["next_observation"])  # [batch, actions]
            judge = online(batch["next_observation"])[0] if self.config.double else target_values
            targets = self._targets(batch, target_values, judge)

        values, raw = online(batch["observation"])
        chosen = _of_actions(values, batch)
        huber = functional.huber_loss(chosen, targets, reduction="none")
        distance = (torch.tanh(raw) - online.to_control(batch["control"])).square().mean(1)
        rows = huber + self.config.hybrid.weight * distance
        return _loss(batch, rows, targets - chosen, values, target_values)

    def _improve(self, batch: Tensors) -> Loss:
        online, target = self._networks()
        with torch.no_grad():
            after = batch["next_observation"]
            control_after = torch.tanh(target.raw_control(after))
            target_values = target.values(after, control_after)  # [batch, actions]
            judge = online.values(after, control_after) if self.config.double else target_values
            targets = self._targets(batch, target_values, judge)

        values = online.values(batch["observation"], online.to_control(batch["control"]))
        chosen = _of_actions(values, batch)
        critic = functional.huber_loss(chosen, targets, reduction="none")

        raw = online.raw_control(batch["observation"])
        climbed = online.values(batch["observation"], torch.tanh(raw), frozen=True)
        climb = (1 - SHARE_OF_ALL) * climbed.amax(1) + SHARE_OF_ALL * climbed.mean(1)
        flat = (raw.abs() - FLAT_FROM).clamp(min=0).square().mean(1)
        rows = critic + self.config.hybrid.weight * (flat - climb)
        return _loss(batch, rows, targets - chosen, values, target_values)

    def _targets(self, batch: Tensors, target_values: Tensor, judge: Tensor) -> Tensor:
        """y: the target network's value of the action that `judge` thinks best."""
        bootstrap = target_values.gather(1, judge.argmax(1, keepdim=True)).squeeze(1)
        return self.config.reward_scale * batch["return"] + batch["discount"] * bootstrap

    def _networks(self) -> tuple[HybridNetwork, HybridNetwork]:
        online, target = self.online, self.target.network
        assert isinstance(online, HybridNetwork)
        assert isinstance(target, HybridNetwork)
        return online, target


def _of_actions(values: Tensor, batch: Tensors) -> Tensor:
    """The values of the actions that were taken, [batch]."""
    if "action" not in batch:
        return values.squeeze(1)
    return values.gather(1, batch["action"].unsqueeze(1)).squeeze(1)


def _loss(batch: Tensors, rows: Tensor, td: Tensor, values: Tensor, target_values: Tensor) -> Loss:
    return Loss(
        value=(batch["weight"] * rows).mean(),
        priorities=td.detach().abs(),
        values=values.detach(),
        target_values=target_values,
    )
