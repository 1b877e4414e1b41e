"""How a loss is run: as it stands, compiled (`learner.compile`), in bfloat16 (`learner.precision`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from services.learner.training import Tensors
from shared.config import LearnerConfig
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.learner.algorithms.base import Loss

LossFunction = Callable[[Tensors], "Loss"]


def prepared_loss(loss: LossFunction, config: LearnerConfig, device: torch.device) -> LossFunction:
    """The loss as the config wants it run."""
    if config.compile:
        loss = _compiled(loss, device)
    if config.precision == "bfloat16":
        loss = _in_bfloat16(loss, device)
    return loss


def _compiled(loss: LossFunction, device: torch.device) -> LossFunction:
    if device.type == "cpu":
        _need_compiler()
    # Batches have one size (two with micro-batches), so the compiler may count on it.
    compiled: LossFunction = torch.compile(loss, dynamic=False)
    return compiled


def _need_compiler() -> None:
    # Imported here: it takes seconds, which a learner that compiles nothing does not have.
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "learner.compile = true: on a CPU torch compiles with a C++ compiler, and there is none here; "
            "install g++, name yours in the environment variable CXX, or set learner.compile to false"
        ) from None


def _in_bfloat16(loss: LossFunction, device: torch.device) -> LossFunction:
    def run(batch: Tensors) -> Loss:
        # Without the cache of cast weights, which all threads share: each worker's graph has its own casts.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            found = loss(batch)
        return replace(
            found,
            value=found.value.float(),
            priorities=found.priorities.float(),
            values=found.values.float(),
            target_values=found.target_values.float(),
        )

    return run
