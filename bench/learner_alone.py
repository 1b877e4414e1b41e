"""Learning without sockets: the bare torch loop that everything is measured against, and workers alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from services.learner.algorithms import build_algorithm
from services.learner.workers import open_trainer
from shared.config import LearnerConfig
from shared.layout import Array
from shared.specs import AgentSpec, Discrete, vector_observation

BATCH = 256
LARGE_BATCH = 2048
CPU = torch.device("cpu")


def make_batch(spec: AgentSpec, size: int, seed: int) -> dict[str, Array]:
    """A batch as replay sends it."""
    rng = np.random.default_rng(seed)
    shape = (size, spec.stack, *spec.observation.shape)
    assert spec.discrete is not None
    return {
        "observation": rng.integers(0, 2, shape).astype(spec.observation.dtype.numpy),
        "next_observation": rng.integers(0, 2, shape).astype(spec.observation.dtype.numpy),
        "action": rng.integers(0, spec.discrete.n, size),
        "return": rng.random(size).astype(np.float32),
        "discount": np.full(size, 0.857, np.float32),
        "weight": rng.random(size).astype(np.float32),
        "index": np.arange(size),
        "generation": np.ones(size, np.uint64),
        "version": np.zeros(size, np.int64),
    }


class DuelingNetwork(nn.Module):
    """The same network as the product's, written plainly."""

    def __init__(self, inputs: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, actions + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        advantage = heads[:, 1:]
        return heads[:, :1] + advantage - advantage.mean(1, keepdim=True)


class BareLoop:
    """A double-DQN step as a script would write it: inputs in memory, fused Adam, clipping, soft target."""

    def __init__(self, spec: AgentSpec) -> None:
        assert spec.discrete is not None
        torch.manual_seed(0)
        inputs = spec.stack * int(np.prod(spec.observation.shape))
        self.online = DuelingNetwork(inputs, 128, spec.discrete.n)
        self.target = DuelingNetwork(inputs, 128, spec.discrete.n)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-3, eps=1e-5, fused=True)
        batch = make_batch(spec, BATCH, 0)
        self.batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        for name in ("observation", "next_observation"):
            self.batch[name] = self.batch[name].reshape(BATCH, inputs).to(torch.float32)

    def run(self, seconds: float) -> tuple[int, float]:
        """Updates and the time they took."""
        updates, started = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started) < seconds:
            self.step()
            updates += 1
        return updates, elapsed_s

    def step(self) -> None:
        batch = self.batch
        with torch.no_grad():
            best = self.online(batch["next_observation"]).argmax(1, keepdim=True)
            bootstrap = self.target(batch["next_observation"]).gather(1, best).squeeze(1)
            targets = 0.1 * batch["return"] + batch["discount"] * bootstrap
        chosen = self.online(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = (batch["weight"] * functional.huber_loss(chosen, targets, reduction="none")).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 0.01)


class UpdateAlone:
    """The product's own update on a batch in memory, as replay sends it."""

    def __init__(self, spec: AgentSpec) -> None:
        self.algorithm = build_algorithm(spec, LearnerConfig(), CPU, 0)
        self.batch = make_batch(spec, BATCH, 0)

    def run(self, seconds: float) -> tuple[int, float]:
        """Updates and the time they took."""
        updates, started = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started) < seconds:
            self.algorithm.update(self.batch)
            updates += 1
        return updates, elapsed_s


def large_settings(workers: int) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {"network": {"hidden": [512, 512]}, "batch_size": LARGE_BATCH, "workers": workers}
    )


LARGE = AgentSpec(observation=vector_observation(128), discrete=Discrete(n=8))


class WorkersAlone:
    """The product's gradient workers, fed from memory."""

    def __init__(self, workers: int, threads: int) -> None:
        self.workers, self.threads = workers, threads
        settings = large_settings(workers)
        self.trainer = open_trainer(build_algorithm(LARGE, settings, CPU, 0), settings, lambda: None)
        self.batches = deque(make_batch(LARGE, LARGE_BATCH, seed) for seed in range(8))
        self._contention = "-"

    def run(self, seconds: float) -> float:
        """Updates/s."""
        torch.set_num_threads(self.threads)
        started, updates = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - started) < seconds:
            while self.trainer.room:
                self.trainer.train(0, self.batches[0])
                self.batches.rotate()
                if self.workers == 1:
                    break
            updates += len(self.trainer.finished(idle=True))
            if self.workers > 1:
                time.sleep(0.0005)  # the loop's thread waits in the system in the product, too
        updates += self._drain()
        elapsed_s = time.perf_counter() - started
        ratios = [value for name, value in self.trainer.metrics().items() if name.endswith("contention")]
        if ratios:
            self._contention = f"{sum(ratios) / len(ratios):.2f}"
        torch.set_num_threads(1)
        return updates / elapsed_s

    def _drain(self) -> int:
        done = 0
        while self.trainer.untrained:
            done += len(self.trainer.finished(idle=True))
            time.sleep(0.0005)
        return done + len(self.trainer.finished(idle=True))

    def contention(self) -> str:
        return self._contention

    def close(self) -> None:
        self.trainer.stop(5.0)


class TwoProcesses:
    """One worker in each of two processes that share nothing: what the two cores can give at most."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        self.processes = []
        for core in sorted(os.sched_getaffinity(0))[:2]:
            mine, theirs = context.Pipe()
            process = context.Process(target=_train_when_told, args=(theirs, core), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def run(self, seconds: float) -> float:
        """Updates/s of both together."""
        for pipe in self.pipes:
            pipe.send(seconds)
        return float(sum(pipe.recv() for pipe in self.pipes))

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)


def _train_when_told(pipe: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    alone = WorkersAlone(1, threads=1)
    alone.run(0.5)
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        pipe.send(alone.run(seconds))
