"""What every algorithm shares: rows and schedules, the target network, clipping, state under names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shared.config import PriorityConfig, TargetConfig
from shared.errors import TrainingFailed
from shared.layout import Array, Arrays
from shared.logs import get_logger

log = get_logger()

Tensors = dict[str, Tensor]


def aligned(arrays: Arrays) -> Arrays:
    """The arrays in memory of torch's own, which is aligned: matrix products of the same numbers may differ
    in their last bits with the address that they lie at."""
    return {name: torch.tensor(array).numpy() for name, array in arrays.items()}


def mean_of(numbers: Array) -> float:
    """numpy's own `mean` takes three times as long for a batch of whole numbers."""
    return int(np.add.reduce(numbers)) / len(numbers)


def beta_at(priority: PriorityConfig, draw: int) -> float:
    """The importance-weight exponent of a draw: linear from beta_start to beta_end."""
    progress = min(1.0, draw / priority.beta_updates)
    return priority.beta_start + progress * (priority.beta_end - priority.beta_start)


class TargetNetwork:
    """A copy of the online network that follows it: softly, by copies, or both (MISSION L8)."""

    def __init__(self, online: nn.Module, target: nn.Module, config: TargetConfig) -> None:
        self.network = target
        self.copies = 0
        self._config = config
        self._online = [parameter.detach() for parameter in online.parameters()]
        self._target = [parameter.detach() for parameter in target.parameters()]
        for parameter in target.parameters():
            parameter.requires_grad_(False)
        self.copy()

    def copy(self) -> None:
        torch._foreach_copy_(self._target, self._online)
        self.copies += 1

    def follow(self, updates: int) -> None:
        """Called after each optimizer step with the number of updates done."""
        config = self._config
        if updates <= config.warmup_updates and updates % config.warmup_every == 0:
            self.copy()
            return
        if config.mode in ("soft", "both"):
            torch._foreach_lerp_(self._target, self._online, config.tau)
        if config.mode in ("hard", "both") and updates % config.hard_every == 0:
            self.copy()

    def watch(self, online_q: float, target_q: float) -> bool:
        """Copies when the two networks' mean |Q| lie further apart than the watchdog's factor."""
        factor = self._config.watchdog
        if max(online_q, target_q) <= factor * max(min(online_q, target_q), 1.0):
            return False
        self.copy()
        log.warning("target network copied by the watchdog", online_q=online_q, target_q=target_q)
        return True


def clip_gradients(gradients: Sequence[Tensor], clip_norm: float) -> Tensor:
    """Scales the gradients down to `clip_norm` in place; returns their norm before that.

    torch's own clip_grad_norm_ does the same in five times the time: it groups tensors by device first.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    # On a GPU nobody looks at the norm, which would be a wait: everything is multiplied, mostly by 1.
    if norm.is_cuda or norm > clip_norm:
        torch._foreach_mul_(list(gradients), (clip_norm / norm).clamp(max=1.0))
    return norm


class SkippedInARow:
    """Counts updates that were not finite. One bad batch is nothing; if nothing else comes, all is spoilt."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def note(self, skipped: bool) -> None:
        """One more update; TrainingFailed when too many were skipped in a row."""
        self._count = self._count + 1 if skipped else 0
        if self._count >= self._most:
            raise TrainingFailed(
                f"{self._count} updates in a row were not finite (learner.max_skipped); "
                "go on from the last checkpoint"
            )


def finite(tensors: Tensors) -> Tensors:
    """These tensors, which lie on the CPU, or TrainingFailed: what is spoilt must never leave a learner."""
    spoilt = [
        name
        for name, tensor in tensors.items()
        # numpy takes a sixth of torch's time for this.
        if tensor.is_floating_point() and not np.isfinite(_as_numpy(tensor)).all()
    ]
    if spoilt:
        raise TrainingFailed(
            f"values that are not finite in {len(spoilt)} of {len(tensors)} tensors "
            f"({', '.join(spoilt[:3])}); go on from the last checkpoint"
        )
    return tensors


def _as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """numpy has no bfloat16."""
    array: npt.NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def named_state(prefix: str, state: Mapping[str, Tensor]) -> Tensors:
    """A state dict with each name under a prefix."""
    return {f"{prefix}/{name}": tensor for name, tensor in state.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The inverse of `named_state`."""
    return {
        name.removeprefix(f"{prefix}/"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}/")
    }
