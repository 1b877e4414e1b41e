"""What every algorithm is, and all that does not differ between them: one update from batch to new weights.

An algorithm of one's own is one subclass: it names its `network` and computes a `loss`. An update has two
phases, so that several workers can share one set of weights: `gradients` only reads them, and any number of
workers may be in it; `apply` (clip, step, target) changes them and is one worker's alone.

    class Mine(Algorithm):
        network = QNetwork

        def loss(self, batch: Tensors) -> Loss: ...
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.learner.adam import Adam
from services.learner.training import (
    TargetNetwork,
    Tensors,
    clip_gradients,
    named_state,
    to_tensors,
    under_prefix,
)
from shared.config import LearnerConfig
from shared.layout import Arrays
from shared.logs import get_logger
from shared.networks import PolicyNetwork, draw_noise_from, flat_input
from shared.specs import AgentSpec

log = get_logger()

FIGURES_EVERY = 25  # updates: each figure costs as much as a small layer


@dataclass(frozen=True, slots=True)
class Loss:
    """What an algorithm makes of a batch."""

    value: Tensor  # the mean over the batch, importance weights included: what is differentiated
    priorities: Tensor  # [batch] |td|, without a graph
    values: Tensor  # online action values of any shape, without a graph: for figures
    target_values: Tensor  # the target network's, likewise


@dataclass(frozen=True, slots=True)
class Gradients:
    """One worker's own gradients of one batch, and what is to be said about it."""

    gradients: tuple[Tensor, ...]  # one for each of the algorithm's parameters
    priorities: npt.NDArray[np.float32]  # [batch] |td|
    loss: float
    figures: dict[str, float]
    target_size: float  # mean |Q| of both networks; both 0 when there are no figures
    online_size: float


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update: new raw priorities for its rows, and figures for people (not with every update)."""

    priorities: npt.NDArray[np.float32]  # [batch] |td|
    loss: float
    grad_norm: float
    figures: dict[str, float]  # td, q_mean, q_max; empty most of the time


class Algorithm(ABC):
    """One agent's networks and optimizer, and the update that trains them."""

    network: ClassVar[type[PolicyNetwork]]

    def __init__(self, spec: AgentSpec, config: LearnerConfig, device: torch.device, seed: int) -> None:
        self.spec, self.config, self.device = spec, config, device
        self.updates = 0
        self.skipped = 0  # updates whose loss was not finite
        # Random numbers of this algorithm alone: several may live in one process (sequential mode).
        self.generator = torch.Generator(device).manual_seed(seed)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            self.online = self.network.build(spec, config).to(device)
            target = self.network.build(spec, config).to(device)
        for network in (self.online, target):
            draw_noise_from(network, self.generator)
        self.target = TargetNetwork(self.online, target, config.target)
        self.parameters = list(self.online.parameters())
        self.optimizer = Adam(dict(self.online.named_parameters()), lr=config.lr, epsilon=config.adam_epsilon)

    @abstractmethod
    def loss(self, batch: Tensors) -> Loss:
        """The loss of a batch, with its graph. Both observations are float32 [batch, inputs] here.

        It must change nothing: several workers may be in it at the same time.
        """

    # --- an update --------------------------------------------------------------------------------------

    def update(self, arrays: Arrays) -> UpdateReport | None:
        """One gradient step on a batch. None: it was not finite, nothing was changed."""
        gradients = self.gradients(arrays)
        return None if gradients is None else self.apply(gradients)

    def gradients(self, arrays: Arrays) -> Gradients | None:
        """The read phase: forward and backward, in micro-batches. None: the loss was not finite."""
        batch = self.to_batch(arrays)
        size, parts = len(batch["return"]), self.config.micro_batches
        if parts == 1:
            loss = self.loss(batch)
            return self._finish(loss, loss.value.item(), torch.autograd.grad(loss.value, self.parameters))
        return self._accumulate(batch, size, parts)

    def _accumulate(self, batch: Tensors, size: int, parts: int) -> Gradients | None:
        """Backward after each micro-batch: the gradient of the whole with the memory of a part (L5)."""
        total: list[Tensor] | None = None
        losses: list[Loss] = []
        loss_value = 0.0
        for rows in torch.arange(size).tensor_split(parts):
            if not len(rows):
                continue
            first, last = int(rows[0]), int(rows[-1]) + 1
            loss = self.loss({name: tensor[first:last] for name, tensor in batch.items()})
            share = loss.value * ((last - first) / size)
            gradients = torch.autograd.grad(share, self.parameters)
            loss_value += share.item()
            losses.append(loss)
            if total is None:
                total = list(gradients)
            else:
                torch._foreach_add_(total, list(gradients))
        assert total is not None
        whole = Loss(
            value=losses[0].value,
            priorities=torch.cat([loss.priorities for loss in losses]),
            values=torch.cat([loss.values for loss in losses]),
            target_values=torch.cat([loss.target_values for loss in losses]),
        )
        return self._finish(whole, loss_value, tuple(total))

    def _finish(self, loss: Loss, loss_value: float, gradients: tuple[Tensor, ...]) -> Gradients | None:
        if not math.isfinite(loss_value):
            self._skip("loss", loss_value)
            return None
        figures, target_size, online_size = {}, 0.0, 0.0
        if (self.updates + 1) % FIGURES_EVERY == 0:
            target_size = float(loss.target_values.abs().mean())
            online_size = float(loss.values.abs().mean())
            figures = {
                "td": float(loss.priorities.mean()),
                "q_mean": float(loss.values.mean()),
                "q_max": float(loss.values.max()),
            }
        priorities = loss.priorities.cpu().numpy()
        return Gradients(gradients, priorities, loss_value, figures, target_size, online_size)

    def apply(self, gradients: Gradients) -> UpdateReport | None:
        """The write phase: clip, step, target. None: the gradient was not finite, nothing was changed."""
        grad_norm = clip_gradients(gradients.gradients, self.config.clip_norm)
        if not math.isfinite(grad_norm):
            self._skip("gradient norm", grad_norm)
            return None
        self.optimizer.step(gradients.gradients)
        self.updates += 1
        self.target.follow(self.updates)
        if gradients.figures:
            self.target.watch(gradients.online_size, gradients.target_size)
        return UpdateReport(gradients.priorities, gradients.loss, grad_norm, gradients.figures)

    def to_batch(self, arrays: Arrays) -> Tensors:
        """A batch as tensors on the device, its observations as the network's inputs."""
        batch = to_tensors(arrays, self.device)
        for name in ("observation", "next_observation"):
            batch[name] = flat_input(batch[name], self.spec)  # [batch, inputs]
        return batch

    def _skip(self, what: str, value: float) -> None:
        self.skipped += 1
        log.warning("not finite; update skipped", what=what, value=value, skipped=self.skipped)

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
        tensors["rng"] = self.generator.get_state()
        tensors["counters"] = torch.tensor([self.updates, self.skipped, self.target.copies])
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def restore(self, tensors: Tensors) -> None:
        """The inverse of `checkpoint`."""
        self.online.load_state_dict(under_prefix("online", tensors))
        self.target.network.load_state_dict(under_prefix("target", tensors))
        self.optimizer.load(under_prefix("adam", tensors))
        self.generator.set_state(tensors["rng"])
        self.updates, self.skipped, self.target.copies = (int(value) for value in tensors["counters"])
