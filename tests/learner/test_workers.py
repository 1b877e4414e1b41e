from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.learner.algorithms.base import Gradients, Loss
from services.learner.algorithms.dqn import DQN
from services.learner.outcome import Outcome
from services.learner.training import Tensors
from services.learner.workers import GradientWorkers, OwnThread, Trained, Trainer, open_trainer
from shared.config import LearnerConfig
from shared.errors import Stuck
from shared.layout import Arrays
from shared.specs import AgentSpec, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(12), discrete=Discrete(n=3))
CPU = torch.device("cpu")
PATIENCE_S = 30.0
NOT_FINITE = 7  # the seed of a batch whose update is skipped


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_config(**changes: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"network": {"hidden": [32, 32]}, "batch_size": 64} | changes)


@functools.cache  # one batch at one address: products of the same numbers may differ with it
def make_batch(seed: int, size: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    returns = rng.normal(size=size).astype(np.float32)
    if seed == NOT_FINITE:
        returns[3] = np.nan
    return {
        "observation": rng.normal(size=(size, 1, 12)).astype(np.float32),
        "next_observation": rng.normal(size=(size, 1, 12)).astype(np.float32),
        "action": rng.integers(0, 3, size),
        "return": returns,
        "discount": np.full(size, 0.9, np.float32),
        "weight": rng.random(size).astype(np.float32),
        "index": np.full(size, seed),
        "generation": np.ones(size, np.uint64),
        "version": np.zeros(size, np.int64),
    }


class Pausing(DQN):
    """Stops in the middle of an update, between forward and backward, until the test lets it go on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pause = False
        self.forward_done, self.go_on = threading.Event(), threading.Event()

    def loss(self, batch: Tensors) -> Loss:
        loss = super().loss(batch)
        if self.pause:
            self.pause = False
            self.forward_done.set()
            assert self.go_on.wait(PATIENCE_S)
        return loss


class Recording(DQN):
    """Keeps the weights and the batch of every gradient it computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[Tensors, Tensors, Arrays, Gradients]] = []
        self.inside = self.most_inside = 0

    def gradients(self, arrays: Arrays) -> Gradients:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        online = {name: tensor.clone() for name, tensor in self.online.state_dict().items()}
        target = {name: tensor.clone() for name, tensor in self.target.network.state_dict().items()}
        found = super().gradients(arrays)
        kept = tuple(gradient.clone() for gradient in found.gradients)  # clipping scales them in place
        self.seen.append((online, target, arrays, Gradients(kept, found.loss, found.priorities, ())))
        self.inside -= 1
        return found


def train_all(trainer: Trainer, batches: list[Arrays]) -> list[Trained]:
    """What the service's loop does, until all is trained."""
    waiting, trained = list(batches), []
    deadline = time.monotonic() + PATIENCE_S
    while len(trained) < len(batches):
        assert time.monotonic() < deadline
        while waiting and trainer.room:
            trainer.train(len(batches) - len(waiting), waiting.pop(0))
        finished = trainer.finished(idle=not waiting)
        trained += finished
        if not finished:
            time.sleep(0.001)
    return trained


def make_workers(algorithm: DQN, wake: Callable[[], None] = lambda: None) -> GradientWorkers:
    return GradientWorkers(algorithm, algorithm.config, wake)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- why the lock lies where it does ----------------------------------------------------------------------


def test_backward_after_another_workers_step_raises() -> None:
    """000's order: forward under the read lock, then another worker's step, then backward."""
    algorithm = DQN(SPEC, make_config(), CPU, seed=0)
    forward = algorithm.loss(algorithm.to_batch(make_batch(0)))
    algorithm.update(make_batch(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(forward.value, algorithm.parameters)


def test_backward_after_an_unnoticed_step_is_silently_wrong() -> None:
    """Where a step hides from autograd, as writes through `.data` do, the gradient is just another one."""
    algorithm = DQN(SPEC, make_config(), CPU, seed=0)
    right = algorithm.gradients(make_batch(0)).gradients
    forward = algorithm.loss(algorithm.to_batch(make_batch(0)))
    for parameter in algorithm.parameters:
        parameter.data.add_(0.05)
    wrong = torch.autograd.grad(forward.value, algorithm.parameters)
    assert not all(torch.equal(first, second) for first, second in zip(right, wrong, strict=True))


def test_step_of_another_worker_waits_until_the_backward_is_done() -> None:
    """One worker stands between forward and backward; the other's step comes after, and both are exact."""
    algorithm = Pausing(SPEC, make_config(workers=2), CPU, seed=0)
    algorithm.pause = True
    workers = make_workers(algorithm)
    workers.train(0, make_batch(0))
    assert algorithm.forward_done.wait(PATIENCE_S)
    workers.train(1, make_batch(1))
    wait_for(lambda: workers._lock._waiting_writers)  # the other has its gradient and wants to step
    assert algorithm.updates == 0
    algorithm.go_on.set()
    train_all_submitted(workers, 2)
    assert workers.stop(PATIENCE_S)
    possible = [steps_on_first_weights(*order) for order in ((0, 1), (1, 0))]
    found = algorithm.policy()
    assert any(all(torch.equal(found[name], each[name]) for name in found) for each in possible)


def steps_on_first_weights(*seeds: int) -> Tensors:
    """The policy after both steps, each with the gradient that its batch has at the weights of the start."""
    alone = DQN(SPEC, make_config(), CPU, seed=0)
    for gradients in [alone.gradients(make_batch(seed)) for seed in seeds]:
        alone.settle(alone.apply(gradients))
    return alone.policy()


def train_all_submitted(workers: GradientWorkers, count: int) -> list[Trained]:
    trained: list[Trained] = []
    wait_for(lambda: trained.extend(workers.finished(idle=True)) or len(trained) == count)
    return trained


def test_every_gradient_of_several_workers_is_that_of_one_alone() -> None:
    """On the same batch and weights, bit for bit; and the workers really were at it at the same time."""
    algorithm = Recording(SPEC, make_config(workers=4), CPU, seed=0)
    workers = make_workers(algorithm)
    train_all(workers, [make_batch(100 + number, size=1024) for number in range(80)])
    assert workers.stop(PATIENCE_S)
    assert algorithm.most_inside > 1
    alone = DQN(SPEC, make_config(), CPU, seed=1)
    for online, target, arrays, found in algorithm.seen:
        alone.online.load_state_dict(online)
        alone.target.network.load_state_dict(target)
        expected = alone.gradients(arrays)
        assert torch.equal(expected.loss, found.loss)
        assert torch.equal(expected.priorities, found.priorities)
        assert all(map(torch.equal, expected.gradients, found.gradients))


# --- counting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_make_as_many_updates_as_they_get_batches(workers: int) -> None:
    """Every batch comes back once with its own report; one that is not finite is counted and not made."""
    algorithm = DQN(SPEC, make_config(workers=workers), CPU, seed=0)
    trainer = open_trainer(algorithm, algorithm.config, lambda: None)
    assert isinstance(trainer, OwnThread if workers == 1 else GradientWorkers)
    seeds = [NOT_FINITE if number % 10 == 5 else 1000 + number for number in range(60)]
    trained = train_all(trainer, [make_batch(seed) for seed in seeds])
    assert sorted(int(each.arrays["index"][0]) for each in trained) == sorted(seeds)
    assert [each.arrays["index"][0] == NOT_FINITE for each in trained] == [
        each.report is None for each in trained
    ]
    assert (algorithm.updates, algorithm.skipped) == (54, 6)
    steps = [tensor for name, tensor in algorithm.optimizer.state().items() if name.startswith("step/")]
    assert {float(step) for step in steps} == {54.0}
    assert trainer.untrained == 0
    assert trainer.oldest_start is None
    assert trainer.stop(PATIENCE_S)


def test_one_worker_trains_in_the_callers_thread_as_before() -> None:
    """Without threads, one batch at a time, with the same bits as calling update."""
    trainer, twin = OwnThread(DQN(SPEC, make_config(), CPU, 0)), DQN(SPEC, make_config(), CPU, 0)
    threads = threading.active_count()
    for seed in range(5):
        assert trainer.room == 1
        trainer.train(seed, make_batch(seed))
        assert trainer.room == 0
        (trained,) = trainer.finished(idle=False)
        report = twin.update(make_batch(seed))
        assert trained.report is not None
        assert report is not None
        assert trained.report.loss == report.loss
        np.testing.assert_array_equal(trained.report.priorities, report.priorities)
    assert threading.active_count() == threads
    for name, tensor in twin.policy().items():
        assert torch.equal(tensor, trainer._algorithm.policy()[name])


def test_workers_have_room_for_one_batch_each_and_one_to_follow() -> None:
    """More is refused by saying so: the queue is bounded."""
    algorithm = Pausing(SPEC, make_config(workers=2), CPU, seed=0)
    workers = make_workers(algorithm)
    algorithm.pause = True
    assert workers.room == 4
    for seed in range(4):
        workers.train(seed, make_batch(seed))
    assert workers.room == 0
    algorithm.go_on.set()
    wait_for(lambda: algorithm.updates == 4)
    assert workers.room == 0  # until the loop has taken what was trained
    assert len(train_all_submitted(workers, 4)) == 4
    assert workers.room == 4
    assert workers.stop(PATIENCE_S)


def test_loop_is_woken_for_each_update() -> None:
    """It may be asleep in the operating system; nothing else tells it."""
    wakes: list[int] = []
    algorithm = DQN(SPEC, make_config(workers=2), CPU, seed=0)
    workers = make_workers(algorithm, lambda: wakes.append(1))
    for seed in range(3):
        workers.train(seed, make_batch(seed))
    wait_for(lambda: len(wakes) == 3)
    assert len(workers.finished(idle=True)) == 3
    assert workers.stop(PATIENCE_S)


def test_stopped_workers_leave_what_they_did_not_begin_untrained() -> None:
    """A checkpoint then says so, and a resumed learner draws as many again."""
    algorithm = Pausing(SPEC, make_config(workers=2), CPU, seed=0)
    algorithm.pause = True
    workers = make_workers(algorithm)
    workers.train(0, make_batch(0))
    assert algorithm.forward_done.wait(PATIENCE_S)
    workers.train(1, make_batch(1))
    wait_for(lambda: workers._lock._waiting_writers)
    for seed in (2, 3):
        workers.train(seed, make_batch(seed))
    stopper = threading.Timer(0.05, algorithm.go_on.set)
    stopper.start()
    assert workers.stop(PATIENCE_S)
    stopper.join()
    assert len(workers.finished(idle=True)) == 2
    assert workers.untrained == 2
    assert algorithm.updates == 2
    assert not any(thread.is_alive() for thread in workers._threads)


def test_weights_read_under_the_read_lock_are_those_of_one_update() -> None:
    """While workers train, a copy is always whole: all its tensors have the same number of steps."""

    class Even(DQN):
        """Every step adds 1 to each weight, tensor by tensor, with time to look in between."""

        def apply(self, gradients: Gradients) -> Outcome:
            for parameter in self.parameters:
                parameter.data.add_(1.0)
                time.sleep(0.0002)
            self.updates += 1
            return Outcome(gradients.priorities, (gradients.loss, gradients.loss))

    algorithm = Even(SPEC, make_config(workers=3), CPU, seed=0)
    for parameter in algorithm.parameters:
        parameter.data.zero_()
    workers = make_workers(algorithm)
    batches = [make_batch(seed) for seed in range(100, 160)]
    taken = trained = copies = 0
    while trained < len(batches):
        while taken < len(batches) and workers.room:
            workers.train(taken, batches[taken])
            taken += 1
        with workers.reading():
            policy, updates, untrained = algorithm.policy(), algorithm.updates, workers.untrained
        assert {float(value) for tensor in policy.values() for value in tensor.unique()} == {updates}
        assert updates == taken - untrained
        copies += 1
        trained += len(workers.finished(idle=False))
    assert copies > 3
    assert workers.stop(PATIENCE_S)


# --- failures ---------------------------------------------------------------------------------------------


def test_exception_in_a_worker_is_raised_in_the_loops_thread() -> None:
    """As if the loop had trained itself; the lock is free again, and the loop was woken."""

    class Failing(DQN):
        def loss(self, batch: Tensors) -> Loss:
            raise ZeroDivisionError("a loss of one's own")

    woken = threading.Event()
    workers = make_workers(Failing(SPEC, make_config(workers=2), CPU, seed=0), woken.set)
    workers.train(0, make_batch(0))
    assert woken.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError, match="of one's own"):
        workers.finished(idle=True)
    with workers.reading():
        pass
    assert workers.stop(PATIENCE_S)
    assert workers.untrained == 1


def test_worker_stuck_past_its_deadline_ends_the_learner() -> None:
    """The loop hears it from `finished`, cannot be caught behind the lock, and leaves the worker behind."""
    algorithm = Pausing(SPEC, make_config(workers=2, update_deadline_s=0.2), CPU, seed=0)
    algorithm.pause = True
    workers = make_workers(algorithm)
    before = time.monotonic()
    workers.train(0, make_batch(0))
    assert algorithm.forward_done.wait(PATIENCE_S)
    assert workers.finished(idle=True) == []
    assert workers.oldest_start is not None
    assert before <= workers.oldest_start <= time.monotonic()
    workers.train(1, make_batch(1))
    wait_for(lambda: workers._lock._waiting_writers)
    with pytest.raises(Stuck, match="no read lock"), workers.reading():
        pass
    with pytest.raises(Stuck, match=r"more than 0\.2 s .*update_deadline_s"):
        workers.finished(idle=True)
    assert not workers.stop(0.01)
    algorithm.go_on.set()
    assert workers.stop(PATIENCE_S)


# --- micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 64, 1000])
def test_micro_batches_give_the_gradient_of_the_whole_batch(parts: int) -> None:
    """Also when they are of different sizes, and when there are more of them than rows."""
    whole = DQN(SPEC, make_config(), CPU, seed=0).gradients(make_batch(0))
    accumulated = DQN(SPEC, make_config(micro_batches=parts), CPU, seed=0).gradients(make_batch(0))
    assert float(accumulated.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    torch.testing.assert_close(accumulated.priorities, whole.priorities)
    for first, second in zip(accumulated.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)


def test_micro_batches_keep_less_for_the_backward_pass() -> None:
    """What autograd saves at any one time is a part's activations, not the batch's."""

    def most_saved(parts: int) -> int:
        algorithm = DQN(SPEC, make_config(micro_batches=parts), CPU, seed=0)
        now = most = 0

        class Saved:
            """Counts the bytes of a tensor for as long as the graph holds it."""

            def __init__(self, tensor: torch.Tensor) -> None:
                nonlocal now, most
                self.tensor = tensor
                now += tensor.nbytes
                most = max(most, now)

            def __del__(self) -> None:
                nonlocal now
                now -= self.tensor.nbytes

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            algorithm.gradients(make_batch(0, size=1024))
        return most

    assert most_saved(8) < most_saved(1) / 4
