"""Archery, played and learned without sockets: rollout, buffer, algorithm, greedy play."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.archery import LONG_BOW, SHORT_BOW, Archery
from services.actor.evaluation import PolicyWeights, greedy_returns
from services.actor.rollout import Rollout
from services.learner.algorithms import build_algorithm
from services.replay.buffer import AgentBuffer
from shared.codec import pack_segment, segment_checksum
from shared.config import Config, build_config
from shared.layout import Packed
from shared.messages import Segment
from worlds.base import AgentActions, Array
from worlds.copies import Copies, SingleAction
from worlds.registry import build_world

AGENT = "agent_0"
ENVS = 32


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the services run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_config(continuous: str, noise: float = 0.2) -> Config:
    """Archery with play that is wholly random: epsilon begins at 1 and stays there."""
    return build_config(
        {
            "world": {"name": "examples.archery:archery", "agents": 1},
            "actor": {"epsilon": {"start": 1.0, "base": 1.0}, "noise": {"scale": noise}},
            "learner": {"algorithm": "hybrid", "hybrid": {"continuous": continuous}},
        }
    )


class OnlyAim(Archery):
    """Archery with the right bow already in hand."""

    def __init__(self, seed: int, agents: int, max_turns: int) -> None:
        super().__init__(seed, agents, max_turns)
        self.specs = {agent: spec.model_copy(update={"discrete": None}) for agent, spec in self.specs.items()}

    def reward(self, agent: str, action: SingleAction) -> float:
        right = LONG_BOW if self.targets[agent][1] else SHORT_BOW
        return super().reward(agent, replace(action, discrete=right))


def make_rollout(config: Config, seed: int) -> Rollout:
    return Rollout(config, build_world(config.world, ENVS, seed), actor_index=0, first_epoch=0)


def filled_buffer(directory: Path, config: Config, rollout: Rollout, turns: int) -> AgentBuffer:
    """A buffer with all that the rollout plays in so many turns."""
    spec, learner = rollout.world.specs[AGENT], config.learner
    buffer = AgentBuffer(
        directory,
        AGENT,
        spec,
        capacity_steps=config.replay.capacity_steps,
        segment_steps=config.segment_steps,
        n_step=learner.n_step,
        gamma=learner.gamma,
        alpha=learner.priority.alpha,
        priority_epsilon=learner.priority.epsilon,
        min_steps=1,
        samples_per_insert=config.replay.samples_per_insert,
        tolerance_samples=1e9,
        seed=config.seed,
    )
    cuts = [cut for _ in range(turns) for _agent, cut in rollout.turn(1e9)] + [
        cut for _agent, cut in rollout.close()
    ]
    for number, cut in enumerate(cuts, start=1):
        segment = Segment(
            incarnation="0" * 32,
            agent=AGENT,
            sequence=number,
            produced_steps=rollout.produced_steps[AGENT],
            actor_index=0,
            slot=cut.slot,
            epoch=cut.epoch,
            before=cut.before,
            owned=cut.owned,
            rows=cut.rows,
            checksum=segment_checksum(pack_segment(spec, cut.arrays)),
        )
        assert buffer.insert(segment, cut.arrays) == "stored"
    return buffer


def test_control_of_a_drawn_row_is_the_one_that_the_world_was_given(tmp_path: Path) -> None:
    """From the dice through a segment and the ring to a batch, beside its choice and what was seen."""
    config = make_config("improve")
    rollout = make_rollout(config, seed=1)
    executed: dict[tuple[float, ...], tuple[int, float]] = {}
    act = rollout.world.act

    def watched(actions: dict[str, AgentActions]) -> object:
        seen: Array = rollout.world.observe()[AGENT]
        discrete, continuous = actions[AGENT].discrete, actions[AGENT].continuous
        assert discrete is not None
        assert continuous is not None
        for slot in range(ENVS):
            executed[tuple(seen[slot].tolist())] = int(discrete[slot]), float(continuous[slot, 0])
        return act(actions)

    rollout.world.act = watched  # type: ignore[method-assign, assignment]
    batch = filled_buffer(tmp_path, config, rollout, turns=60).draw(0, 256, beta=0.4)
    assert len(executed) == 60 * ENVS
    for row in range(256):
        found = int(batch["action"][row]), float(batch["control"][row, 0])
        assert found == executed[tuple(batch["observation"][row, 0].tolist())]
    assert np.unique(batch["control"]).size > 200


def greedy_return_after_training(directory: Path, continuous: str, updates: int) -> float:
    config = make_config(continuous)
    rollout = make_rollout(config, seed=0)
    buffer = filled_buffer(directory, config, rollout, turns=200)
    learner = config.learner
    algorithm = build_algorithm(rollout.world.specs[AGENT], learner, torch.device("cpu"), seed=0)
    for number in range(updates):
        batch: Packed = buffer.draw(number, learner.batch_size, beta=0.4)
        report = algorithm.update(batch)
        assert report is not None
        buffer.update_priorities(batch["index"], batch["generation"], report.priorities)
    policy = {name: tensor.numpy() for name, tensor in algorithm.policy().items()}
    return float(greedy_returns(config, {AGENT: PolicyWeights(1, policy)}, 100, seed=5)[AGENT].mean())


def test_improving_beats_imitating_where_play_is_random(tmp_path: Path) -> None:
    """From the same random play: one learns to aim, the other aims at the middle. The best possible is 40."""
    imitated, improved = (
        greedy_return_after_training(tmp_path / continuous, continuous, updates=400)
        for continuous in ("imitate", "improve")
    )
    assert improved > 30
    assert imitated < 15


def test_evaluation_adds_no_noise() -> None:
    """Greedy play is the same whatever actors do to explore."""
    returns = []
    for noise in (0.0, 5.0):
        config = make_config("improve", noise)
        spec = make_rollout(config, seed=0).world.specs[AGENT]
        policy = build_algorithm(spec, config.learner, torch.device("cpu"), seed=0).policy()
        weights = {AGENT: PolicyWeights(1, {name: tensor.numpy() for name, tensor in policy.items()})}
        returns.append(greedy_returns(config, weights, 8, seed=3)[AGENT])
    np.testing.assert_array_equal(returns[0], returns[1])


def test_agent_with_a_control_alone_is_played_stored_and_trained(tmp_path: Path) -> None:
    """No column for a choice anywhere between the dice and the critic."""
    config = make_config("improve")
    world = Copies(lambda seed: OnlyAim(seed, 1, config.world.max_turns), ENVS, seed=2)
    rollout = Rollout(config, world, actor_index=0, first_epoch=0)
    batch = filled_buffer(tmp_path, config, rollout, turns=60).draw(0, 64, beta=0.4)
    assert "action" not in batch
    algorithm = build_algorithm(world.specs[AGENT], config.learner, torch.device("cpu"), seed=0)
    assert algorithm.update(batch) is not None
    rollout.load(AGENT, 1, {name: tensor.numpy() for name, tensor in algorithm.policy().items()})
    rollout.turn(1e9)
