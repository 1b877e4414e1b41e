"""A user's algorithm that writes down when, and in which thread, each of its updates ran."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from services.learner.algorithms.base import Gradients, Loss, UpdateReport
from services.learner.algorithms.dqn import DQN
from services.learner.training import Tensors

UPDATE_S = 0.002  # at least: so that updates at the same time are seen to be so, on however few cores


class TimedDQN(DQN):
    """Appends "start end thread" to the file `options.log`, in monotonic seconds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log = Path(self.config.options["log"])
        self.began = 0.0

    def loss(self, batch: Tensors) -> Loss:
        self.began = time.monotonic()
        time.sleep(UPDATE_S)
        return super().loss(batch)

    def apply(self, gradients: Gradients) -> UpdateReport | None:
        report = super().apply(gradients)
        with self.log.open("a") as file:
            file.write(f"{self.began} {time.monotonic()} {threading.current_thread().name}\n")
        return report
