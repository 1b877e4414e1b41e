"""What every algorithm is, and all that does not differ between them: one update from batch to new weights.

An algorithm of one's own is one subclass: it names its `network` and computes a `loss`. An update has two
phases, so that several workers can share one set of weights: `gradients` only reads them, and any number of
workers may be in it; `apply` (clip, step, target) and `settle` change them and are one worker's alone.

    class Mine(Algorithm):
        network = QNetwork

        def loss(self, batch: Tensors) -> Loss: ...
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.learner.adam import Adam
from services.learner.fast_loss import prepared_loss
from services.learner.outcome import Outcome
from services.learner.staging import open_staging
from services.learner.training import TargetNetwork, Tensors, clip_gradients, named_state, under_prefix
from shared.config import LearnerConfig
from shared.layout import Arrays
from shared.logs import get_logger
from shared.networks import PolicyNetwork, draw_noise_from, flat_input
from shared.specs import AgentSpec

log = get_logger()

FIGURES_EVERY = 25  # updates: each figure costs as much as a small layer
FIGURES = ("td", "q_mean", "q_max", "online_size", "target_size")  # the sizes: mean |Q| of both networks


@dataclass(frozen=True, slots=True)
class Loss:
    """What an algorithm makes of a batch."""

    value: Tensor  # the mean over the batch, importance weights included: what is differentiated
    priorities: Tensor  # [batch] |td|, without a graph
    values: Tensor  # online action values of any shape, without a graph: for figures
    target_values: Tensor  # the target network's, likewise


@dataclass(frozen=True, slots=True)
class Gradients:
    """One worker's own gradients of one batch, and what is to be said about it: all still on the device."""

    gradients: tuple[Tensor, ...]  # one for each of the algorithm's parameters
    loss: Tensor  # a scalar
    priorities: Tensor  # [batch] |td|
    figures: tuple[Tensor, ...]  # scalars, by the names in FIGURES; empty most of the time


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
        self.skipped = 0  # updates whose loss or gradient was not finite
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
        self._staging = open_staging(device, buffers=config.workers + 1)
        self._loss = prepared_loss(self.loss, config, device)

    @abstractmethod
    def loss(self, batch: Tensors) -> Loss:
        """The loss of a batch, with its graph. Both observations are float32 [batch, inputs] here.

        It must change nothing: several workers may be in it at the same time.
        """

    # --- an update --------------------------------------------------------------------------------------

    def update(self, arrays: Arrays) -> UpdateReport | None:
        """One gradient step on a batch. None: it was not finite, nothing was changed."""
        return self.settle(self.apply(self.gradients(arrays)))

    def gradients(self, arrays: Arrays) -> Gradients:
        """The read phase: forward and backward, in micro-batches."""
        batch = self.to_batch(arrays)
        size, parts = len(batch["return"]), min(self.config.micro_batches, len(batch["return"]))
        if parts > 1:
            return self._accumulate(batch, size, parts)
        loss = self._loss(batch)
        return self._gradients(loss, loss.value.detach(), torch.autograd.grad(loss.value, self.parameters))

    def _accumulate(self, batch: Tensors, size: int, parts: int) -> Gradients:
        """Backward after each micro-batch: the gradient of the whole with the memory of a part (L5)."""
        total: list[Tensor] = []
        losses: list[Loss] = []
        shares: list[Tensor] = []
        edges = [size * part // parts for part in range(parts + 1)]
        for first, last in pairwise(edges):
            loss = self._loss({name: tensor[first:last] for name, tensor in batch.items()})
            share = loss.value * ((last - first) / size)
            gradients = torch.autograd.grad(share, self.parameters)
            shares.append(share.detach())
            losses.append(loss)
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = list(gradients)
        loss_value = torch.stack(shares).sum()
        whole = Loss(
            value=loss_value,
            priorities=torch.cat([loss.priorities for loss in losses]),
            values=torch.cat([loss.values for loss in losses]),
            target_values=torch.cat([loss.target_values for loss in losses]),
        )
        return self._gradients(whole, loss_value, tuple(total))

    def _gradients(self, loss: Loss, value: Tensor, gradients: tuple[Tensor, ...]) -> Gradients:
        figures: tuple[Tensor, ...] = ()
        if (self.updates + 1) % FIGURES_EVERY == 0:
            values, sizes = loss.values, (loss.values.abs().mean(), loss.target_values.abs().mean())
            figures = (loss.priorities.mean(), values.mean(), values.max(), *sizes)
        return Gradients(gradients, value, loss.priorities, figures)

    def apply(self, gradients: Gradients) -> Outcome:
        """The write phase: clip, step, target. A step that is not finite is stopped.

        On a GPU the host never looks: the kernel stops the step, `settle` hears of it later, and only the
        target has gone on towards weights that stayed what they were.
        """
        norm = clip_gradients(gradients.gradients, self.config.clip_norm)
        outcome = Outcome(gradients.priorities, (gradients.loss, norm, *gradients.figures))
        self.updates += 1
        stop: Tensor | None = None
        if norm.is_cuda:
            stop = 1.0 - torch.isfinite(gradients.loss + norm).float()
        elif not math.isfinite(gradients.loss + norm):
            return outcome
        self.optimizer.step(gradients.gradients, stop)
        self.target.follow(self.updates)
        return outcome

    def settle(self, outcome: Outcome) -> UpdateReport | None:
        """Reads what an update left and takes account of it. None: it was not finite and did not count."""
        priorities, (loss, norm, *numbers) = outcome.read()
        if not math.isfinite(loss + norm):
            self.updates -= 1
            self.skipped += 1
            log.warning("not finite; update skipped", loss=loss, grad_norm=norm, skipped=self.skipped)
            return None
        figures = dict(zip(FIGURES, numbers, strict=False))
        if figures:
            self.target.watch(figures.pop("online_size"), figures.pop("target_size"))
        return UpdateReport(priorities, loss, norm, figures)

    def to_batch(self, arrays: Arrays) -> Tensors:
        """A batch as tensors on the device, its observations as the network's inputs."""
        batch = self._staging.to_device(arrays)
        for name in ("observation", "next_observation"):
            batch[name] = flat_input(batch[name], self.spec)  # [batch, inputs]
        return batch

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
