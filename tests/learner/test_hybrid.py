from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.learner.algorithms import build_algorithm
from services.learner.algorithms.base import Gradients
from services.learner.algorithms.hybrid import Hybrid
from shared.config import LearnerConfig
from shared.errors import ConfigError
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation

SPEC = AgentSpec(
    observation=vector_observation(2),
    discrete=Discrete(n=2),
    continuous=Continuous(size=1, low=-2.0, high=4.0),
)
AIMER = AgentSpec(observation=vector_observation(2), continuous=Continuous(size=1))
CPU = torch.device("cpu")
VARIANTS = ["imitate", "improve"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the services run: threads that wait for one another only spin on networks this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_config(continuous: str, **changes: Any) -> LearnerConfig:
    fields = {
        "algorithm": "hybrid",
        "hybrid": {"continuous": continuous, "weight": 0.5},
        "network": {"hidden": [2], "dueling": False},
        "reward_scale": 0.1,
        "clip_norm": 1e6,
        "lr": 0.01,
    }
    return LearnerConfig.model_validate(fields | changes)


def make_batch(**changes: Any) -> dict[str, np.ndarray]:
    """Three rows: a one-step row, a terminated one, and a three-step one that was truncated.

    In [-1, 1] the executed controls are 0, 0.5 and -1.
    """
    batch = {
        "observation": np.array([[[1.0, 2.0]], [[3.0, 0.0]], [[0.0, 1.0]]], np.float32),
        "next_observation": np.array([[[3.0, 2.0]], [[9.0, 9.0]], [[1.0, 4.0]]], np.float32),
        "action": np.array([1, 0, 0]),
        "control": np.array([[1.0], [2.5], [-2.0]], np.float32),
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
        control=rng.uniform(-2, 4, (size, 1)).astype(np.float32),
        **{"return": rng.normal(size=size).astype(np.float32)},
        discount=np.full(size, 0.9, np.float32),
        weight=rng.random(size).astype(np.float32),
    )


def hand_made(continuous: str, **changes: Any) -> Hybrid:
    """For every s without negative parts, with u the control in [-1, 1]:

    imitate: online Q(s) = s, target Q(s) = (s0, 10 s1); mu(s) = tanh(0.5 s0 - 0.25).
    improve: online Q(s, u) = (s0, s1 + 2u), target (s0, 10 s1 + 20u), where s1 + 2u is not negative;
             mu(s) = tanh(0.5 s0 - 0.25), mu_target(s) = tanh(0.25).
    """
    algorithm = Hybrid(SPEC, make_config(continuous, **changes), CPU, seed=0)
    improve = continuous == "improve"
    body = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 2.0]]) if improve else torch.eye(2)
    control = torch.tensor([[0.5, 0.0]])
    for network, scale, control_weight, control_bias in (
        (algorithm.online, 1.0, control, -0.25),
        (algorithm.target.network, 10.0, 0 * control, 0.25),
    ):
        weights = {
            "body.0.weight": body,
            "body.0.bias": torch.zeros(2),
            "head.weight": torch.tensor([[1.0, 0.0], [0.0, scale]]),
            "head.bias": torch.zeros(2),
            "control_head.weight": control_weight,
            "control_head.bias": torch.tensor([control_bias]),
        }
        if improve:
            weights |= {"control_body.0.weight": torch.eye(2), "control_body.0.bias": torch.zeros(2)}
        network.load_state_dict(weights)
    return algorithm


def gradients_by_name(algorithm: Hybrid, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    found = algorithm.gradients(batch)
    assert isinstance(found, Gradients)
    names = [name for name, _ in algorithm.online.named_parameters()]
    return dict(zip(names, found.gradients, strict=True))


def huber(td: float) -> float:
    return 0.5 * td * td if abs(td) <= 1 else abs(td) - 0.5


def weighted_mean(rows: list[float]) -> float:
    return sum(weight * row for weight, row in zip([1.0, 0.5, 0.25], rows, strict=True)) / 3


# --- losses and targets by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(("double", "bootstraps"), [(True, [3.0, 0.0, 40.0]), (False, [20.0, 0.0, 40.0])])
def test_imitation_of_a_tiny_batch_has_the_numbers_done_by_hand(
    double: bool, bootstraps: list[float]
) -> None:
    """Huber on the value and the square of the distance to the executed control, weighted row by row."""
    report = hand_made("imitate", double=double).update(make_batch())
    assert report is not None
    targets = [0.1 * 10 + 0.9 * bootstraps[0], 0.1 * -20, 0.729 * bootstraps[2]]
    td = [target - chosen for target, chosen in zip(targets, [2.0, 3.0, 0.0], strict=True)]
    np.testing.assert_allclose(report.priorities, np.abs(td), rtol=1e-5)
    distances = [(math.tanh(0.25) - 0.0) ** 2, (math.tanh(1.25) - 0.5) ** 2, (math.tanh(-0.25) + 1.0) ** 2]
    rows = [huber(error) + 0.5 * distance for error, distance in zip(td, distances, strict=True)]
    assert report.loss == pytest.approx(weighted_mean(rows), rel=1e-5)


@pytest.mark.parametrize("double", [True, False])
def test_improvement_of_a_tiny_batch_has_the_numbers_done_by_hand(double: bool) -> None:
    """The target is valued at its own control, the critic trained at the executed one, mu by what it gets."""
    report = hand_made("improve", double=double).update(make_batch())
    assert report is not None
    # At s' = (3, 2) and the target's control the online network's values are (3, 2 + 2 tanh 0.25 = 2.49): it
    # takes action 0, the target itself action 1. At (1, 4) both take action 1.
    u = math.tanh(0.25)
    bootstraps = [3.0 if double else 20 + 20 * u, 0.0, 40 + 20 * u]
    targets = [0.1 * 10 + 0.9 * bootstraps[0], 0.1 * -20, 0.729 * bootstraps[2]]
    chosen = [2.0 + 2 * 0.0, 3.0, 0.0]
    td = [target - value for target, value in zip(targets, chosen, strict=True)]
    np.testing.assert_allclose(report.priorities, np.abs(td), rtol=1e-5)
    controls = [math.tanh(0.25), math.tanh(1.25), math.tanh(-0.25)]
    values = [(1.0, 2 + 2 * controls[0]), (3.0, 0 + 2 * controls[1]), (0.0, 1 + 2 * controls[2])]
    climbs = [0.9 * max(pair) + 0.1 * sum(pair) / 2 for pair in values]
    rows = [huber(error) - 0.5 * climb for error, climb in zip(td, climbs, strict=True)]
    assert report.loss == pytest.approx(weighted_mean(rows), rel=1e-5)


def test_control_past_the_flat_of_tanh_costs_the_square_of_the_excess() -> None:
    """z = 0.5 * 9 - 0.25 = 4.25 in one row: 1.25 squared more, times the continuous weight and the row's."""
    rows = {
        "observation": np.array([[[9.0, 0.0]]], np.float32),
        "next_observation": np.zeros((1, 1, 2), np.float32),
        "action": np.array([0]),
        "control": np.array([[1.0]], np.float32),
        "return": np.array([90.0], np.float32),
        "discount": np.zeros(1, np.float32),
        "weight": np.array([0.5], np.float32),
    }
    report = hand_made("improve").update(rows)
    assert report is not None
    climb = 0.9 * 9 + 0.1 * (9 + 2 * math.tanh(4.25)) / 2
    assert report.loss == pytest.approx(0.5 * (0.0 + 0.5 * (1.25**2 - climb)), rel=1e-5)


@pytest.mark.parametrize("continuous", VARIANTS)
def test_terminated_row_ignores_what_it_saw_next_and_truncated_one_does_not(continuous: str) -> None:
    """With discount 0 the next observation has no say; an epoch that merely ran out bootstraps."""
    plain = hand_made(continuous).update(make_batch())
    assert plain is not None
    for row, changes in ((1, False), (2, True)):
        batch = make_batch()
        batch["next_observation"][row] += 5.0
        report = hand_made(continuous).update(batch)
        assert report is not None
        assert (report.priorities[row] != plain.priorities[row]) == changes


@pytest.mark.parametrize("continuous", VARIANTS)
def test_importance_weight_zero_takes_a_row_out_of_every_part_of_the_loss(continuous: str) -> None:
    """Critic, imitation and climbing are all weighted; the priority is not."""
    two = {name: values[:2] for name, values in make_batch(weight=np.array([1, 0, 1], np.float32)).items()}
    one = {name: values[:1] for name, values in make_batch(weight=np.array([0.5, 1, 1], np.float32)).items()}
    both, alone = (gradients_by_name(hand_made(continuous), batch) for batch in (two, one))
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, alone[name], msg=name)


# --- whose gradient goes where ------------------------------------------------------------------------------


def test_climbing_leaves_the_critic_alone_and_the_critic_the_control() -> None:
    """The continuous weight scales the control's gradients alone; returns change the critic's alone."""

    def gradients(weight: float, scale: float) -> dict[str, torch.Tensor]:
        config = make_config("improve", hybrid={"continuous": "improve", "weight": weight})
        batch = random_batch(3)
        batch["return"] = batch["return"] * np.float32(scale)
        return gradients_by_name(Hybrid(SPEC, config, CPU, seed=4), batch)

    plain, climbing, richer = gradients(0.5, 1.0), gradients(1.0, 1.0), gradients(0.5, 9.0)
    for name, gradient in plain.items():
        assert gradient.abs().sum() > 0, name
        is_control = name.startswith("control_")
        torch.testing.assert_close(climbing[name], (2 if is_control else 1) * gradient, msg=name)
        assert torch.equal(richer[name], gradient) == is_control, name


def test_climbing_gradient_is_the_slope_of_the_value_at_the_control() -> None:
    """One row whose best action's value rises by 2 for each unit of u; the other action's does not."""
    row = {name: values[:1] for name, values in make_batch().items()}
    gradient = gradients_by_name(hand_made("improve"), row)["control_head.bias"]
    slope = (0.9 + 0.1 / 2) * 2.0 * (1 - math.tanh(0.25) ** 2)
    assert gradient.item() == pytest.approx(-0.5 * slope, rel=1e-5)


@pytest.mark.parametrize("continuous", VARIANTS)
@pytest.mark.parametrize("parts", [3, 16])
def test_gradient_in_micro_batches_is_that_of_the_whole(continuous: str, parts: int) -> None:
    """Every part of the loss is a mean over rows."""
    whole, pieces = (
        gradients_by_name(
            Hybrid(SPEC, make_config(continuous, network={"hidden": [8]}, micro_batches=count), CPU, seed=1),
            random_batch(5),
        )
        for count in (1, parts)
    )
    for name, gradient in whole.items():
        torch.testing.assert_close(pieces[name], gradient, msg=name)


# --- coming back, and what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("continuous", VARIANTS)
def test_restored_learner_goes_on_bit_for_bit(continuous: str) -> None:
    """A learner from a checkpoint makes the same next updates as one that never stopped."""
    config = make_config(continuous, network={"hidden": [8]})
    first, second = Hybrid(SPEC, config, CPU, seed=1), Hybrid(SPEC, config, CPU, seed=2)
    for number in range(7):
        first.update(random_batch(number))
    second.restore(first.checkpoint())
    for number in range(10):
        for each in (first, second):
            each.update(random_batch(100 + number))
    kept, restored = first.checkpoint(), second.checkpoint()
    assert kept.keys() == restored.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, restored[name]), name


@pytest.mark.parametrize("continuous", VARIANTS)
def test_control_that_is_not_finite_changes_nothing_and_is_counted(continuous: str) -> None:
    """One NaN must not reach the weights."""
    algorithm = hand_made(continuous)
    before = algorithm.policy()
    assert algorithm.update(make_batch(control=np.full((3, 1), np.nan, np.float32))) is None
    assert (algorithm.updates, algorithm.skipped) == (0, 1)
    assert all(torch.equal(before[name], value) for name, value in algorithm.policy().items())


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (
            AgentSpec(observation=vector_observation(2), discrete=Discrete(n=2)),
            {},
            "needs a continuous action",
        ),
        (SPEC, {"network": {"noisy": True}}, r"network\.noisy"),
        (SPEC, {"algorithm": "dqn"}, "take hybrid"),
    ],
    ids=["discrete", "noisy", "dqn"],
)
def test_agent_that_the_algorithm_cannot_serve_is_refused_in_words(
    spec: AgentSpec, changes: dict[str, Any], reason: str
) -> None:
    """A wrong pair of algorithm and world is told at the start."""
    with pytest.raises(ConfigError, match=reason):
        build_algorithm(spec, make_config("improve", **changes), CPU, 0)


# --- learning -----------------------------------------------------------------------------------------------


def one_turn(rng: np.random.Generator, size: int = 64) -> dict[str, np.ndarray]:
    """Random play of one state: action 0 pays nothing, action 1 what its control is near to -0.5."""
    action, control = rng.integers(0, 2, size), rng.uniform(-1, 1, (size, 1)).astype(np.float32)
    paid = np.where(action == 1, 1 - 3 * np.abs(control[:, 0] + 0.5), 0.0)
    return make_batch(
        observation=np.ones((size, 1, 2), np.float32),
        next_observation=np.ones((size, 1, 2), np.float32),
        action=action,
        control=control,
        **{"return": paid.astype(np.float32)},
        discount=np.zeros(size, np.float32),
        weight=np.ones(size, np.float32),
    )


def choice_of_trained(spec: AgentSpec, updates: int, raw_control: float) -> tuple[int | None, float]:
    config = make_config("improve", network={"hidden": [32, 32]}, reward_scale=1.0, lr=2e-3)
    algorithm = Hybrid(spec, config, CPU, seed=0)
    with torch.no_grad():
        algorithm.online.control_head.bias.fill_(raw_control)
    algorithm.target.copy()
    rng = np.random.default_rng(0)
    for _ in range(updates):
        batch = one_turn(rng)
        if spec.discrete is None:
            keep = batch.pop("action") == 1
            batch = {name: values[keep] for name, values in batch.items()}
        algorithm.update(batch)
    chosen = algorithm.online.act(torch.ones(1, 2))
    assert chosen.continuous is not None
    discrete = None if chosen.discrete is None else int(chosen.discrete)
    return discrete, chosen.continuous.item()


def test_control_finds_its_way_from_the_flat_end_of_tanh_while_another_action_looks_better() -> None:
    """It begins at the wrong end, where the other action is the best one and tanh gives no slope."""
    spec = AgentSpec(observation=vector_observation(2), discrete=Discrete(n=2), continuous=Continuous(size=1))
    discrete, control = choice_of_trained(spec, 800, raw_control=12.0)
    assert discrete == 1
    assert control == pytest.approx(-0.5, abs=0.15)


def test_agent_without_a_discrete_action_learns_its_control() -> None:
    """One value for each state, and a control that climbs it."""
    discrete, control = choice_of_trained(AIMER, 400, raw_control=0.0)
    assert discrete is None
    assert control == pytest.approx(-0.5, abs=0.15)
