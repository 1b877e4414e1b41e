from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from services.learner.algorithms.base import FIGURES_EVERY
from services.learner.algorithms.dqn import DQN
from services.learner.training import TargetNetwork, clip_gradients, named_state, under_prefix
from shared.codec import decode, encode
from shared.config import LearnerConfig, TargetConfig
from shared.messages import Batch, Token
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


def make_config(**changes: Any) -> LearnerConfig:
    fields = {
        "network": {"hidden": [2], "dueling": False},
        "reward_scale": 0.1,
        "clip_norm": 1e6,
        "lr": 0.01,
    }
    return LearnerConfig.model_validate(fields | changes)


def hand_made(**changes: Any) -> DQN:
    """Online Q(s) = s and target Q(s) = (s0, 10 s1) for every s without negative parts."""
    algorithm = DQN(SPEC, make_config(**changes), CPU, seed=0)
    for network, head in (
        (algorithm.online, torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
        (algorithm.target.network, torch.tensor([[1.0, 0.0], [0.0, 10.0]])),
    ):
        network.load_state_dict(
            {
                "body.0.weight": torch.eye(2),
                "body.0.bias": torch.zeros(2),
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
        "action": np.array([1, 0, 0]),
        "return": np.array([10.0, -20.0, 0.0], np.float32),
        "discount": np.array([0.9, 0.0, 0.729], np.float32),
        "weight": np.array([1.0, 0.5, 0.25], np.float32),
        "index": np.arange(3),
        "generation": np.ones(3, np.uint64),
        "version": np.zeros(3, np.int64),
    }
    return batch | changes


def huber(td: float) -> float:
    return 0.5 * td * td if abs(td) <= 1 else abs(td) - 0.5


def random_batch(seed: int, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return make_batch(
        observation=rng.normal(size=(size, 1, 2)).astype(np.float32),
        next_observation=rng.normal(size=(size, 1, 2)).astype(np.float32),
        action=rng.integers(0, 2, size),
        **{"return": rng.normal(size=size).astype(np.float32)},
        discount=np.full(size, 0.9, np.float32),
        weight=rng.random(size).astype(np.float32),
        index=np.arange(size),
        generation=np.ones(size, np.uint64),
        version=np.zeros(size, np.int64),
    )


def state_of(algorithm: DQN) -> dict[str, torch.Tensor]:
    tensors = algorithm.checkpoint()
    del tensors["rng"]
    return tensors


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


# --- targets, loss, report --------------------------------------------------------------------------------

# Online argmax of the next observations: 0, (0), 1. Chosen values: 2, 3, 0.
DOUBLE_TARGETS = [0.1 * 10 + 0.9 * 3.0, 0.1 * -20, 0.729 * 40.0]
PLAIN_TARGETS = [0.1 * 10 + 0.9 * 20.0, 0.1 * -20, 0.729 * 40.0]
CHOSEN = [2.0, 3.0, 0.0]


@pytest.mark.parametrize(("double", "targets"), [(True, DOUBLE_TARGETS), (False, PLAIN_TARGETS)])
def test_update_on_a_tiny_batch_has_the_numbers_done_by_hand(double: bool, targets: list[float]) -> None:
    """Targets, priorities and loss: reward scale, n-step discount by row, 0 at the end, weights."""
    algorithm = hand_made(double=double)
    algorithm.updates = FIGURES_EVERY - 1
    report = algorithm.update(make_batch())
    assert report is not None
    td = [target - value for target, value in zip(targets, CHOSEN, strict=True)]
    np.testing.assert_allclose(report.priorities, np.abs(td), rtol=1e-5)
    weights = [1.0, 0.5, 0.25]
    loss = sum(weight * huber(error) for weight, error in zip(weights, td, strict=True)) / 3
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert report.figures == pytest.approx(
        {"td": np.mean(np.abs(td)), "q_mean": (1 + 2 + 3 + 0 + 0 + 1) / 6, "q_max": 3.0}, rel=1e-5
    )


def test_gradient_of_a_tiny_batch_has_the_norm_done_by_hand() -> None:
    """One row with a large error: the gradient is that of one huber slope, scaled by its weight."""
    row = {name: values[:1] for name, values in make_batch().items()}
    row["weight"] = np.array([0.5], np.float32)
    report = hand_made().update(row)
    assert report is not None
    # d loss / d Q = -0.5; hidden = s = (1, 2); head row 1 gets (1, 2) and bias 1; through head weight 1 the
    # second hidden unit gets its inputs (1, 2) and bias 1.
    assert report.grad_norm == pytest.approx(0.5 * np.sqrt((1 + 4 + 1) + (1 + 4 + 1)), rel=1e-5)


def test_terminated_row_ignores_what_it_saw_next() -> None:
    """With discount 0 the next observation has no say."""
    reports = [
        hand_made().update(make_batch(next_observation=next_observation))
        for next_observation in (
            make_batch()["next_observation"],
            make_batch()["next_observation"] + np.array([0.0, 500.0, 0.0], np.float32)[:, None, None],
        )
    ]
    assert reports[0] is not None
    assert reports[1] is not None
    np.testing.assert_array_equal(reports[0].priorities, reports[1].priorities)


def test_importance_weight_zero_takes_a_row_out_of_the_update() -> None:
    """Weights scale each row's part in the gradient, not its priority."""
    kept = {name: values[:2] for name, values in make_batch().items()}
    both, alone = hand_made(), hand_made()
    weighted = {**kept, "weight": np.array([1.0, 0.0], np.float32)}
    report = both.update(weighted)
    assert report is not None
    assert report.priorities[1] > 0
    only = {name: values[:1] for name, values in weighted.items()}
    alone.update({**only, "weight": np.array([0.5], np.float32)})  # the mean is over one row instead of two
    assert_same(state_of(both), state_of(alone))


def test_batch_from_the_wire_trains_like_any_other() -> None:
    """Received arrays are views on frames; torch takes them without a copy and without complaint."""
    frames = [
        zmq.Frame(bytes(data))
        for data in encode(Batch(token=Token(agent="a", number=1), draw=0), make_batch())
    ]
    local, remote = hand_made(), hand_made()
    local.update(make_batch())
    remote.update(decode(frames).arrays)
    assert_same(state_of(local), state_of(remote))


def test_update_counts_itself_and_changes_the_online_network() -> None:
    """Each update is one optimizer step."""
    algorithm = hand_made()
    before = algorithm.policy()
    algorithm.update(make_batch())
    assert algorithm.updates == 1
    assert any(not torch.equal(before[name], value) for name, value in algorithm.policy().items())


# --- what must not harm -----------------------------------------------------------------------------------


def test_gradients_over_the_limit_are_scaled_down_to_it() -> None:
    """The norm over all of them before clipping is returned; below the limit nothing is touched."""
    gradients = [torch.tensor([[3.0]]), torch.tensor([0.0, 4.0])]
    assert float(clip_gradients(gradients, 6.0)) == pytest.approx(5.0)
    assert [gradient.sum().item() for gradient in gradients] == [3.0, 4.0]
    assert float(clip_gradients(gradients, 1.0)) == pytest.approx(5.0)
    assert [gradient.sum().item() for gradient in gradients] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_told_by_their_norm(value: float) -> None:
    """No scaling can repair them."""
    assert not torch.isfinite(clip_gradients([torch.tensor([1.0, value])], 1.0))


def test_update_over_the_limit_steps_with_clipped_gradients() -> None:
    """The report has the norm before clipping, the optimizer gets the clipped one."""
    algorithm = hand_made(clip_norm=0.01)
    report = algorithm.update(make_batch())
    assert report is not None
    assert report.grad_norm > 0.1
    # Adam's first moment after one step is (1 - 0.9) times the gradient that it was given.
    means = [tensor for name, tensor in algorithm.optimizer.state().items() if name.startswith("mean/")]
    assert torch.cat([mean.flatten() for mean in means]).norm().item() == pytest.approx(0.001, rel=1e-4)


@pytest.mark.parametrize(
    "damage",
    [
        {"return": np.array([np.nan, 0.0, 0.0], np.float32)},
        {"weight": np.array([1.0, np.inf, 1.0], np.float32)},
        {"observation": np.full((3, 1, 2), np.nan, np.float32)},
        {"next_observation": np.full((3, 1, 2), np.inf, np.float32)},
    ],
    ids=["return", "weight", "observation", "next"],
)
def test_batch_that_is_not_finite_changes_nothing_and_is_counted(damage: dict[str, np.ndarray]) -> None:
    """One NaN must not reach the weights, the optimizer or the target."""
    algorithm, twin = hand_made(), hand_made()
    for each in (algorithm, twin):
        each.update(make_batch())
    assert algorithm.update(make_batch(**damage)) is None
    assert (algorithm.updates, algorithm.skipped) == (1, 1)
    algorithm.skipped = 0
    assert_same(state_of(algorithm), state_of(twin))
    algorithm.update(make_batch())
    twin.update(make_batch())
    assert_same(state_of(algorithm), state_of(twin))


# --- the target network -----------------------------------------------------------------------------------


def make_target(**changes: Any) -> tuple[torch.nn.Linear, TargetNetwork]:
    online, target = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        online.weight.fill_(0.0)
    network = TargetNetwork(online, target, TargetConfig(**changes))
    with torch.no_grad():
        online.weight.fill_(1.0)
    return online, network


def follow(target: TargetNetwork, updates: int) -> list[float]:
    values = []
    for update in range(1, updates + 1):
        target.follow(update)
        values.append(round(float(next(target.network.parameters())), 6))
    return values


def test_new_target_is_a_copy_without_gradients() -> None:
    """It begins equal to the online network and is never trained itself."""
    online, target = make_target()
    assert float(next(target.network.parameters())) == 0.0
    assert not next(target.network.parameters()).requires_grad
    target.copy()
    assert torch.equal(next(target.network.parameters()), online.weight)


def test_soft_target_moves_by_tau_every_update() -> None:
    """target += tau * (online - target)."""
    assert follow(make_target(mode="soft", tau=0.5)[1], 3) == [0.5, 0.75, 0.875]


def test_hard_target_is_copied_every_so_many_updates() -> None:
    """In between it stands still."""
    assert follow(make_target(mode="hard", hard_every=3)[1], 4) == [0.0, 0.0, 1.0, 1.0]


def test_target_of_both_kinds_moves_softly_and_is_copied() -> None:
    """Soft every update, and a copy on top."""
    assert follow(make_target(mode="both", tau=0.5, hard_every=3)[1], 3) == [0.5, 0.75, 1.0]


def test_target_in_its_warmup_is_copied_often_and_then_follows_its_mode() -> None:
    """The warm-up's copies come on top of the mode and end with it."""
    _online, target = make_target(mode="hard", hard_every=100, warmup_updates=4, warmup_every=2)
    assert follow(target, 2) == [0.0, 1.0]
    copies = target.copies
    follow(target, 9)
    assert target.copies == copies + 2  # updates 2 and 4 again, none after


def test_watchdog_copies_a_target_that_left_the_online_network() -> None:
    """Too far apart, in either direction, it is copied and counted; small values never are."""
    _online, target = make_target(watchdog=10.0)
    copies = target.copies
    assert not target.watch(online_q=5.0, target_q=50.0)
    assert not target.watch(online_q=1e-6, target_q=9.0)
    assert target.copies == copies
    assert target.watch(online_q=5.0, target_q=51.0)
    assert target.watch(online_q=51.0, target_q=5.0)
    assert target.copies == copies + 2
    assert float(next(target.network.parameters())) == 1.0


# --- coming back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [0, 7])
def test_restored_learner_goes_on_bit_for_bit(trained: int) -> None:
    """A learner from a checkpoint makes the same next updates as one that never stopped."""
    config = make_config(network={"hidden": [8]}, target={"mode": "both", "tau": 0.1, "hard_every": 5})
    first = DQN(SPEC, config, CPU, seed=1)
    for number in range(trained):
        first.update(random_batch(number))
    kept = first.checkpoint()
    second = DQN(SPEC, config, CPU, seed=2)
    second.update(random_batch(99))
    if not trained:
        second = DQN(SPEC, config, CPU, seed=2)
    second.restore(kept)
    assert_same(state_of(first), state_of(second))
    for number in range(20):
        reports = [each.update(random_batch(100 + number)) for each in (first, second)]
        assert reports[0] is not None
        assert reports[1] is not None
        np.testing.assert_array_equal(reports[0].priorities, reports[1].priorities)
    assert_same(state_of(first), state_of(second))


def test_checkpoint_is_not_changed_by_further_training() -> None:
    """It is uploaded in pieces while training goes on in place."""
    algorithm = hand_made()
    algorithm.update(make_batch())
    kept = algorithm.checkpoint()
    copies = {name: tensor.clone() for name, tensor in kept.items()}
    policy = algorithm.policy()
    policy_copies = {name: tensor.clone() for name, tensor in policy.items()}
    algorithm.update(make_batch())
    assert_same(kept, copies)
    assert_same(policy, policy_copies)


def test_learner_from_published_weights_has_them_in_both_networks() -> None:
    """Without a checkpoint the policy is all there is."""
    first, second = hand_made(), DQN(SPEC, make_config(), CPU, seed=3)
    second.load_policy(first.policy())
    assert_same(second.policy(), first.policy())
    assert_same(dict(second.target.network.state_dict()), first.policy())


def test_same_seed_begins_with_the_same_weights() -> None:
    """A run's seed fixes the networks."""
    first, second, third = (DQN(SPEC, make_config(), CPU, seed=seed).policy() for seed in (5, 5, 6))
    assert_same(first, second)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_prefixed_state_comes_back_by_its_prefix_alone() -> None:
    """Names that begin alike are kept apart."""
    tensors = named_state("adam/a", {"x": torch.zeros(1)}) | named_state("adam/ab", {"x": torch.ones(1)})
    assert set(tensors) == {"adam/a/x", "adam/ab/x"}
    assert under_prefix("adam/a", tensors)["x"].item() == 0.0
    assert list(under_prefix("adam/ab", tensors)) == ["x"]


# --- learning ---------------------------------------------------------------------------------------------


def test_two_armed_bandit_is_learned() -> None:
    """Values become the scaled rewards of the arms, and the better arm is chosen."""
    algorithm = DQN(SPEC, make_config(network={"hidden": [16]}, reward_scale=0.5), CPU, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(400):
        action = rng.integers(0, 2, 32)
        algorithm.update(
            make_batch(
                observation=np.ones((32, 1, 2), np.float32),
                next_observation=np.ones((32, 1, 2), np.float32),
                action=action,
                **{"return": np.where(action == 1, 2.0, -1.0).astype(np.float32)},
                discount=np.zeros(32, np.float32),
                weight=np.ones(32, np.float32),
            )
        )
    values = algorithm.online(torch.ones(1, 2))[0]
    assert values.tolist() == pytest.approx([-0.5, 1.0], abs=0.05)


def test_value_of_a_chain_is_discounted_once_for_each_step() -> None:
    """Two states, a reward at the end: bootstrapping carries it back, times gamma."""
    config = make_config(network={"hidden": [16]}, reward_scale=1.0, target={"tau": 0.1})
    algorithm = DQN(SPEC, config, CPU, seed=0)
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
    values = algorithm.online(torch.from_numpy(states[:, 0]))
    np.testing.assert_allclose(values.detach().numpy(), [[0.9, 0.9], [1.0, 1.0]], atol=0.05)
