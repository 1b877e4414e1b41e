"""Algorithms of a user whose training fails, when a file tells them to or at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from services.learner.algorithms.base import Loss
from services.learner.algorithms.dqn import DQN
from services.learner.training import Tensors

RAISED = "this loss cannot be computed"


class FailsWhenTold(DQN):
    """Fails once in the way that the file `options.trigger` names; the file is gone then.

    Until then only every fifth loss is not finite, which is no reason to end.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trigger = Path(self.config.options["trigger"])
        self.failing = ""
        self.calls = 0

    def loss(self, batch: Tensors) -> Loss:
        if not self.failing and self.trigger.exists():
            self.failing = self.trigger.read_text()
            self.trigger.unlink()
        loss = super().loss(batch)
        self.calls += 1
        if self.failing == "raise":
            raise RuntimeError(RAISED)
        if self.failing == "hang":
            hang()
        if self.failing == "nan" or self.calls % 5 == 0:  # "nan": until this process ends
            return replace(loss, value=loss.value * torch.nan)
        if self.failing == "poison":  # the weights are spoilt, and no loss shows it
            with torch.no_grad():
                self.parameters[0].fill_(torch.nan)
            harmless = torch.stack([parameter.nan_to_num().sum() for parameter in self.parameters]).sum()
            return replace(loss, value=harmless, priorities=torch.zeros_like(loss.priorities))
        return loss


class FailsAtOnce(DQN):
    """Raises in its first update, in every life."""

    def loss(self, batch: Tensors) -> Loss:
        raise RuntimeError(RAISED)


def hang() -> None:
    """For hours, inside C code that keeps the interpreter to itself."""
    re.match(r"(a+)+$", "a" * 40 + "b")
