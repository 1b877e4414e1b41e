"""Batches on their way to a device, and updates that never look back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.learner.adam import Adam
from services.learner.algorithms.dqn import DQN
from services.learner.outcome import Outcome
from services.learner.staging import NoStaging, PinnedStaging, open_staging, views
from services.learner.workers import OwnThread
from shared.config import LearnerConfig
from shared.layout import pack
from shared.specs import AgentSpec, Discrete, vector_observation

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")


def make_batch(seed: int, size: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.integers(0, 2, (size, 2, 7)).astype(np.uint8),
        "next_observation": rng.integers(0, 2, (size, 2, 7)).astype(np.uint8),
        "action": rng.integers(0, 3, size),
        "return": rng.normal(size=size).astype(np.float32),
        "discount": np.full(size, 0.9, np.float32),
        "weight": rng.random(size).astype(np.float32),
        "index": np.arange(size),
        "generation": np.ones(size, np.uint64),
        "version": np.zeros(size, np.int64),
    }


def make_algorithm(device: torch.device, **changes: Any) -> DQN:
    spec = AgentSpec(observation=vector_observation(7, "uint8"), stack=2, discrete=Discrete(n=3))
    config = LearnerConfig.model_validate({"network": {"hidden": [32]}} | changes)
    return DQN(spec, config, device, seed=0)


def test_batch_on_a_cpu_is_the_received_memory() -> None:
    """Nothing is copied; what only replay has a use for is left out."""
    packed = pack(make_batch(0))
    tensors = open_staging(CPU, buffers=2).to_device(packed)
    assert set(tensors) == set(packed) - {"index", "generation"}
    for name, tensor in tensors.items():
        assert tensor.data_ptr() == packed[name].__array_interface__["data"][0]


def test_views_on_a_block_are_the_arrays_that_were_packed() -> None:
    """One transfer brings all of them: each is found in the block by its place."""
    batch = make_batch(1) | {"flag": np.array([True, False]), "half": np.ones((2, 3), np.float16)}
    packed = pack(batch)
    block = torch.from_numpy(packed.block)
    tensors = views(block, packed.layout)
    assert set(tensors) == set(batch) - {"index", "generation"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), batch[name])
        assert tensor.numpy().dtype == batch[name].dtype
        assert tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()


def test_stopped_step_changes_nothing_without_being_looked_at() -> None:
    """With `stop` at 1 parameters, moments and step counts stay; with 0 the step is the usual one."""

    def make() -> tuple[dict[str, torch.Tensor], Adam]:
        parameters = {"weight": torch.linspace(-1, 1, 6).reshape(2, 3), "bias": torch.ones(2)}
        return parameters, Adam(parameters, lr=0.1, epsilon=1e-5)

    gradients = [torch.full((2, 3), 0.5), torch.tensor([1.0, -1.0])]
    damaged = [torch.full((2, 3), torch.nan), torch.tensor([1.0, -1.0])]
    (ours, adam), (theirs, reference) = make(), make()
    for _ in range(3):
        adam.step(gradients, stop=torch.tensor(0.0))
        adam.step(damaged, stop=torch.tensor(1.0))
        reference.step(gradients)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name])
    for name, tensor in adam.state().items():
        assert torch.equal(tensor, reference.state()[name]), name


def test_outcomes_that_have_not_arrived_are_read_after_the_next_launch() -> None:
    """As on a GPU: one update stays unread while there is more to train on, and none when there is not."""

    class Late(Outcome):
        arrived = False

    class Launching(DQN):
        def apply(self, gradients: Any) -> Outcome:
            outcome = super().apply(gradients)
            outcome.__class__ = Late
            return outcome

    plain = make_algorithm(CPU)
    trainer = OwnThread(Launching(plain.spec, plain.config, CPU, seed=0))
    counts = []
    for seed, idle in ((0, False), (1, False), (2, False), (3, True)):
        trainer.train(seed, make_batch(seed))
        counts.append([int(each.report is not None) for each in trainer.finished(idle)])
    assert counts == [[], [1], [1], [1, 1]]
    assert trainer.finished(idle=True) == []


@on_a_gpu
def test_batches_on_a_gpu_arrive_whole_through_two_buffers() -> None:
    """Many batches in flight at once: none is overwritten before it was copied."""
    staging = open_staging(GPU, buffers=2)
    assert isinstance(staging, PinnedStaging)
    staged = [staging.to_device(pack(make_batch(seed, size=4096))) for seed in range(20)]
    for seed, tensors in enumerate(staged):
        for name, tensor in tensors.items():
            assert tensor.device == GPU
            np.testing.assert_array_equal(tensor.cpu().numpy(), make_batch(seed, size=4096)[name])


@on_a_gpu
def test_update_on_a_gpu_never_waits_for_it() -> None:
    """torch raises at any synchronisation between two updates."""
    algorithm = make_algorithm(GPU)
    for seed in range(30):
        algorithm.update(make_batch(seed))
    algorithm.updates = 0
    outcomes = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = [algorithm.apply(algorithm.gradients(make_batch(seed))) for seed in range(30)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(algorithm.settle(outcome) is not None for outcome in outcomes)


@on_a_gpu
def test_updates_on_a_gpu_are_those_of_a_cpu() -> None:
    """To rounding; a batch that is not finite is skipped and counted on both."""
    first, second = make_algorithm(CPU), make_algorithm(GPU)
    for seed in range(20):
        batch = make_batch(seed)
        if seed == 5:
            batch["return"][0] = np.nan
        reports = [each.update(batch) for each in (first, second)]
        assert (reports[0] is None) == (reports[1] is None) == (seed == 5)
    assert (first.updates, first.skipped) == (second.updates, second.skipped) == (19, 1)
    for name, tensor in first.policy().items():
        torch.testing.assert_close(tensor, second.policy()[name], rtol=1e-3, atol=1e-4)


def test_staging_to_another_device_than_cpu_or_gpu_copies() -> None:
    """torch's meta device stands for all of them: shapes arrive there."""
    tensors = NoStaging(torch.device("meta")).to_device(pack(make_batch(0)))
    assert tensors["observation"].shape == (64, 2, 7)
    assert tensors["observation"].device.type == "meta"
