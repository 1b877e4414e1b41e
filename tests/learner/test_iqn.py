from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.learner.algorithms.base import FIGURES_EVERY
from services.learner.algorithms.dqn import DQN
from services.learner.algorithms.iqn import IQN, of_action, quantile_huber
from services.learner.training import Tensors
from shared.config import LearnerConfig
from shared.specs import AgentSpec, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(2), discrete=Discrete(n=2))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the services run: threads that wait for one another only spin on networks this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_config(network: dict[str, Any] | None = None, **changes: Any) -> LearnerConfig:
    fields = {
        "algorithm": "iqn",
        "network": {"hidden": [2], "dueling": False, "cosines": 2} | (network or {}),
        "iqn": {"quantiles": 2, "target_quantiles": 3},
        "reward_scale": 0.1,
        "clip_norm": 1e6,
        "lr": 0.01,
    }
    return LearnerConfig.model_validate(fields | changes)


class GivenTaus(IQN):
    """IQN with fractions that a test chose."""

    taus: tuple[Tensor, Tensor]

    def draw_taus(self, rows: int) -> tuple[Tensor, Tensor]:
        assert rows == len(self.taus[0])
        return self.taus


# cos(pi tau) is 1/2, 0 and -1/2: with the embedding below phi(tau) = (1, 1 + cos(pi tau)).
LOW, MIDDLE, HIGH = 1 / 3, 1 / 2, 2 / 3
FACTOR = {LOW: 1.5, MIDDLE: 1.0, HIGH: 0.5}
TAUS = [[LOW, MIDDLE], [HIGH, LOW], [MIDDLE, HIGH]]  # [rows, N]
TARGET_TAUS = [[HIGH, MIDDLE, LOW], [LOW, LOW, LOW], [HIGH, HIGH, MIDDLE]]  # [rows, N']


def hand_made(**changes: Any) -> GivenTaus:
    """Online Z(s; tau) = (s0, s1 (1 + cos(pi tau))); the target's second action has ten times that.

    Over the fixed fractions of acting cos(pi tau) cancels: Q is (s0, s1), and (s0, 10 s1) of the target.
    """
    algorithm = GivenTaus(SPEC, make_config(**changes), CPU, seed=0)
    algorithm.taus = torch.tensor(TAUS), torch.tensor(TARGET_TAUS)
    for network, head in (
        (algorithm.online, torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
        (algorithm.target.network, torch.tensor([[1.0, 0.0], [0.0, 10.0]])),
    ):
        network.load_state_dict(
            {
                "body.0.weight": torch.eye(2),
                "body.0.bias": torch.zeros(2),
                "embedding.weight": torch.tensor([[0.0, 0.0], [0.0, 1.0]]),
                "embedding.bias": torch.ones(2),
                "head.weight": head,
                "head.bias": torch.zeros(2),
            }
        )
    return algorithm


def make_batch(**changes: Any) -> dict[str, np.ndarray]:
    """Three rows: a one-step row, a terminated one, and a three-step one."""
    batch = {
        "observation": np.array([[[1.0, 2.0]], [[3.0, 0.0]], [[0.0, 1.0]]], np.float32),
        "next_observation": np.array([[[3.0, 2.0]], [[9.0, 9.0]], [[1.0, 4.0]]], np.float32),
        "action": np.array([1, 0, 1]),
        "return": np.array([10.0, -20.0, 0.0], np.float32),
        "discount": np.array([0.9, 0.0, 0.729], np.float32),
        "weight": np.array([1.0, 0.5, 0.25], np.float32),
    }
    return batch | changes


def random_batch(seed: int, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return make_batch(
        observation=rng.normal(size=(size, 1, 2)).astype(np.float32),
        next_observation=rng.normal(size=(size, 1, 2)).astype(np.float32),
        action=rng.integers(0, 2, size),
        **{"return": (10 * rng.normal(size=size)).astype(np.float32)},
        discount=rng.choice([0.0, 0.9, 0.729], size).astype(np.float32),
        weight=rng.random(size).astype(np.float32),
    )


def rho(tau: float, td: float, kappa: float) -> float:
    huber = 0.5 * td * td if abs(td) <= kappa else kappa * (abs(td) - kappa / 2)
    return abs(tau - (1.0 if td < 0 else 0.0)) * huber / kappa


def assert_same(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


# --- by hand ----------------------------------------------------------------------------------------------

# Row 0: a* = 0 when double (Q = 3, 2), and the target says 3 at every fraction; else a* = 1 (Q = 3, 20).
# Row 1 is terminated. Row 2: a* = 1 either way, and the target says 40 (1 + cos(pi tau)).
DOUBLE_TARGETS = [[3.7, 3.7, 3.7], [-2.0, -2.0, -2.0], [0.729 * 20, 0.729 * 20, 0.729 * 40]]
PLAIN_TARGETS = [[1 + 0.9 * 10, 1 + 0.9 * 20, 1 + 0.9 * 30], *DOUBLE_TARGETS[1:]]
# Row 0: 2 (1 + cos(pi tau)); row 1: 3 at every fraction; row 2: 1 + cos(pi tau).
CHOSEN = [[3.0, 2.0], [3.0, 3.0], [1.0, 0.5]]


@pytest.mark.parametrize("kappa", [1.0, 0.5, 20.0])
@pytest.mark.parametrize(("double", "targets"), [(True, DOUBLE_TARGETS), (False, PLAIN_TARGETS)])
def test_update_on_a_tiny_batch_has_the_numbers_done_by_hand(
    double: bool, targets: list[list[float]], kappa: float
) -> None:
    """Targets, priorities and loss: reward scale, discount by row, 0 at the end, weights, kappa."""
    algorithm = hand_made(double=double, iqn={"quantiles": 2, "target_quantiles": 3, "kappa": kappa})
    algorithm.updates = FIGURES_EVERY - 1
    report = algorithm.update(make_batch())
    assert report is not None
    losses, priorities = [], []
    for row in range(3):
        td = [[target - value for target in targets[row]] for value in CHOSEN[row]]
        losses.append(
            sum(rho(tau, error, kappa) for tau, errors in zip(TAUS[row], td, strict=True) for error in errors)
            / 3
        )
        priorities.append(sum(abs(error) for errors in td for error in errors) / 6)
    np.testing.assert_allclose(report.priorities, priorities, rtol=1e-5)
    assert report.loss == pytest.approx((losses[0] + 0.5 * losses[1] + 0.25 * losses[2]) / 3, rel=1e-5)
    # Values of both actions, averaged over the fractions drawn: (1, 2.5), (3, 0), (0, 0.75).
    assert report.figures == pytest.approx(
        {"td": np.mean(priorities), "q_mean": 7.25 / 6, "q_max": 3.0}, rel=1e-5
    )


def test_loss_of_one_row_is_the_number_on_paper() -> None:
    """Row 0 alone, double, kappa 1: every term written out."""
    algorithm = hand_made()
    algorithm.taus = torch.tensor(TAUS[:1]), torch.tensor(TARGET_TAUS[:1])
    report = algorithm.update({name: values[:1] for name, values in make_batch().items()})
    assert report is not None
    # td = 0.7 at tau = 1/3 (quadratic) and 1.7 at tau = 1/2 (linear), three times each.
    assert report.loss == pytest.approx(0.245 / 3 + 1.2 / 2, rel=1e-5)
    np.testing.assert_allclose(report.priorities, [1.2], rtol=1e-5)


@pytest.mark.parametrize(("kappa", "expected"), [(1.0, [0.03125, 1.875]), (2.0, [0.015625, 1.5])])
def test_quantile_huber_weighs_over_and_underestimates_by_the_fraction(
    kappa: float, expected: list[float]
) -> None:
    """At tau = 1/4 an estimate that is too low costs a quarter, one that is too high three quarters."""
    losses, td = quantile_huber(
        torch.tensor([[0.0]]), torch.tensor([[0.5, -3.0]]), torch.tensor([[0.25]]), kappa
    )
    assert td.tolist() == [[[0.5, -3.0]]]
    assert losses.tolist() == [[expected]]


def test_chosen_quantiles_are_those_of_each_rows_action() -> None:
    """[batch, quantiles, actions] by [batch] actions."""
    values = torch.arange(12.0).reshape(2, 3, 2)
    assert of_action(values, torch.tensor([1, 0])).tolist() == [[1.0, 3.0, 5.0], [6.0, 8.0, 10.0]]


def test_terminated_row_ignores_what_it_saw_next_and_a_truncated_one_does_not() -> None:
    """They differ in the discount alone: 0 where the episode terminated, gamma^n where it was cut short."""

    def priorities(discount: float, seen: float) -> np.ndarray:
        changes = {
            "discount": np.full(3, discount, np.float32),
            "next_observation": np.full((3, 1, 2), seen, np.float32),
        }
        report = hand_made().update(make_batch(**changes))
        assert report is not None
        return report.priorities

    np.testing.assert_array_equal(priorities(0.0, 1.0), priorities(0.0, 500.0))
    assert (priorities(0.9, 1.0) != priorities(0.9, 500.0)).all()


def test_importance_weight_scales_the_gradient_and_not_the_priority() -> None:
    """Half the weight on all rows is half the gradient."""
    whole, half = hand_made(), hand_made()
    weights = np.array([1.0, 0.5, 0.25], np.float32)
    full = whole.gradients(make_batch(weight=weights))
    scaled = half.gradients(make_batch(weight=weights / 2))
    assert full is not None
    assert scaled is not None
    np.testing.assert_array_equal(full.priorities, scaled.priorities)
    assert any(bool(gradient.any()) for gradient in full.gradients)
    for first, second in zip(full.gradients, scaled.gradients, strict=True):
        torch.testing.assert_close(first / 2, second)


# --- against the equations as two loops -------------------------------------------------------------------


def naive_loss(
    algorithm: IQN, batch: Tensors, taus: Tensor, target_taus: Tensor
) -> tuple[Tensor, list[float]]:
    """The docstring of iqn.py, one row, one quantile and one pair at a time."""
    kappa, target = algorithm.config.iqn.kappa, algorithm.target.network

    def z(network: Any, observation: Tensor, tau: Tensor) -> Tensor:
        return network(observation.view(1, -1), tau.view(1, 1))[0, 0]  # [actions]

    total, priorities = torch.zeros(()), []
    rows, count = len(taus), algorithm.config.network.act_quantiles
    for row in range(rows):
        after = batch["next_observation"][row]
        judge = algorithm.online if algorithm.config.double else target
        midpoints = [torch.tensor((i + 0.5) / count) for i in range(count)]
        best = int(torch.stack([z(judge, after, tau) for tau in midpoints]).mean(0).argmax())
        row_loss, sizes = torch.zeros(()), []
        for tau in taus[row]:
            value = z(algorithm.online, batch["observation"][row], tau)[int(batch["action"][row])]
            for other in target_taus[row]:
                y = algorithm.config.reward_scale * batch["return"][row]
                y = y + batch["discount"][row] * z(target, after, other)[best].detach()
                td = y - value
                size = td.abs()
                huber = 0.5 * td**2 if size <= kappa else kappa * (size - kappa / 2)
                row_loss = row_loss + (1 - tau if td < 0 else tau) * huber / kappa / len(target_taus[row])
                sizes.append(float(size.detach()))
        total = total + batch["weight"][row] * row_loss / rows
        priorities.append(sum(sizes) / len(sizes))
    return total, priorities


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    quantiles=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kappa=st.sampled_from([0.1, 1.0, 3.0]),
    double=st.booleans(),
    dueling=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_loss_and_gradient_equal_those_of_two_plain_loops(
    *, seed: int, rows: int, quantiles: tuple[int, int], kappa: float, double: bool, dueling: bool
) -> None:
    """Any batch, any number of quantiles: the same loss, priorities and gradient as written out naively."""
    algorithm = GivenTaus(
        SPEC,
        make_config(
            network={"hidden": [4], "dueling": dueling, "cosines": 5, "act_quantiles": 4},
            iqn={"quantiles": quantiles[0], "target_quantiles": quantiles[1], "kappa": kappa},
            double=double,
        ),
        CPU,
        seed,
    )
    with torch.no_grad():
        for parameter in algorithm.target.network.parameters():
            parameter.mul_(-1.5)
    algorithm.taus = IQN.draw_taus(algorithm, rows)
    arrays = random_batch(seed, rows)
    expected, priorities = naive_loss(algorithm, algorithm.to_batch(arrays), *algorithm.taus)
    gradients = torch.autograd.grad(expected, algorithm.parameters, allow_unused=True, materialize_grads=True)
    found = algorithm.gradients(arrays)
    assert found is not None
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(found.priorities, priorities, rtol=1e-4, atol=1e-6)
    for first, second in zip(found.gradients, gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


# --- micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [DQN, IQN])
@pytest.mark.parametrize("parts", [2, 3, 16, 50])
def test_gradient_in_micro_batches_is_that_of_the_whole_batch(
    algorithm: type[DQN] | type[IQN], parts: int
) -> None:
    """Equal up to the order of summation, however the rows divide; IQN's rows keep their own fractions."""
    pieces, whole = (
        algorithm(SPEC, make_config(network={"hidden": [8]}, micro_batches=count), CPU, seed=4).gradients(
            random_batch(0)
        )
        for count in (parts, 1)
    )
    torch.testing.assert_close(pieces.loss, whole.loss)
    torch.testing.assert_close(pieces.priorities, whole.priorities)
    for first, second in zip(pieces.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


# --- random numbers ---------------------------------------------------------------------------------------


def test_fractions_are_drawn_evenly_and_anew_from_the_algorithms_own_numbers() -> None:
    """Uniform over (0, 1), other ones for each row, network and draw; torch's own generator is left alone."""
    algorithm = IQN(SPEC, make_config(iqn={"quantiles": 8, "target_quantiles": 5}), CPU, seed=0)
    before = torch.get_rng_state()
    taus, target_taus = algorithm.draw_taus(2000)
    again, _ = algorithm.draw_taus(2000)
    assert torch.equal(torch.get_rng_state(), before)
    assert (taus.shape, target_taus.shape) == ((2000, 8), (2000, 5))
    drawn = torch.cat([taus, target_taus, again], 1).flatten()
    assert len(drawn.unique()) > 0.99 * len(drawn)
    assert drawn.histc(10, 0, 1).tolist() == pytest.approx([len(drawn) / 10] * 10, rel=0.1)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("algorithm", [DQN, IQN])
def test_restored_learner_goes_on_bit_for_bit(algorithm: type[DQN] | type[IQN], noisy: bool) -> None:
    """Fractions and noise go on where they were: the next updates are those of one that never stopped."""
    config = make_config(network={"hidden": [8], "dueling": True, "noisy": noisy})
    first = algorithm(SPEC, config, CPU, seed=1)
    for number in range(7):
        first.update(random_batch(number))
    second = algorithm(SPEC, config, CPU, seed=2)
    second.update(random_batch(99))
    second.restore(first.checkpoint())
    for number in range(10):
        reports = [each.update(random_batch(100 + number)) for each in (first, second)]
        assert reports[0] is not None
        assert reports[1] is not None
        np.testing.assert_array_equal(reports[0].priorities, reports[1].priorities)
    assert_same(first.checkpoint(), second.checkpoint())


@pytest.mark.parametrize("algorithm", [DQN, IQN])
def test_noisy_learner_has_other_noise_in_each_network_and_each_pass(
    algorithm: type[DQN] | type[IQN],
) -> None:
    """Online and target begin with one set of weights, and still never agree: their noise is independent."""
    learner = algorithm(SPEC, make_config(network={"hidden": [8], "noisy": True}), CPU, seed=1)
    arguments = [torch.ones(4, 2)] + ([torch.full((4, 3), 0.5)] if algorithm is IQN else [])
    with torch.no_grad():
        first, again, target = (
            network(*arguments) for network in (learner.online, learner.online, learner.target.network)
        )
    assert (first != again).all()
    assert (first != target).all()


# --- learning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noisy", [False, True])
def test_quantiles_of_a_uniform_reward_are_learned(noisy: bool) -> None:
    """Action 0 pays evenly between 0 and 1, so its quantile at tau is tau; action 1 always pays a half."""
    network = {"hidden": [32], "dueling": True, "cosines": 16, "noisy": noisy}
    config = make_config(
        network, reward_scale=1.0, iqn={"quantiles": 8, "target_quantiles": 8, "kappa": 0.02}, lr=3e-3
    )
    algorithm = IQN(SPEC, config, CPU, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        action = rng.integers(0, 2, 128)
        algorithm.update(
            make_batch(
                observation=np.ones((128, 1, 2), np.float32),
                next_observation=np.ones((128, 1, 2), np.float32),
                action=action,
                **{"return": np.where(action == 0, rng.random(128), 0.5).astype(np.float32)},
                discount=np.zeros(128, np.float32),
                weight=np.ones(128, np.float32),
            )
        )
    taus = torch.tensor([[0.1, 0.3, 0.5, 0.7, 0.9]])
    with torch.no_grad():
        values = algorithm.online.eval()(torch.ones(1, 2), taus)[0]
    np.testing.assert_allclose(values[:, 0], taus[0], atol=0.1)
    np.testing.assert_allclose(values[:, 1], 0.5, atol=0.1)


def test_value_of_a_chain_is_discounted_once_for_each_step() -> None:
    """Two states, a reward at the end: bootstrapping carries it back, times gamma."""
    network = {"hidden": [16], "dueling": True, "cosines": 8}
    algorithm = IQN(SPEC, make_config(network, reward_scale=1.0, target={"tau": 0.1}), CPU, seed=0)
    states = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)
    rows = np.array([0, 1] * 16)
    for _ in range(600):
        algorithm.update(
            make_batch(
                observation=states[rows],
                next_observation=states[np.ones_like(rows)],
                action=np.tile([0, 0, 1, 1], 8),
                **{"return": np.where(rows == 1, 1.0, 0.0).astype(np.float32)},
                discount=np.where(rows == 1, 0.0, 0.9).astype(np.float32),
                weight=np.ones(32, np.float32),
            )
        )
    with torch.no_grad():
        values = algorithm.online.action_values(algorithm.online.body(torch.from_numpy(states[:, 0])))
    np.testing.assert_allclose(values, [[0.9, 0.9], [1.0, 1.0]], atol=0.05)
