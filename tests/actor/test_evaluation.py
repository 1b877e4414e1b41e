from __future__ import annotations

import numpy as np
import pytest
import torch

from services.actor.evaluation import PolicyWeights, greedy_returns
from shared.algorithms import network_class
from shared.config import Config, build_config
from worlds.registry import build_world


def make_config(algorithm: str, noisy: bool) -> Config:
    return build_config(
        {
            "world": {"agents": 2, "max_turns": 10},
            "learner": {"algorithm": algorithm, "network": {"hidden": [8], "noisy": noisy}},
        }
    )


@pytest.mark.parametrize("algorithm", ["dqn", "iqn"])
def test_greedy_returns_of_noisy_networks_are_those_without_noise(algorithm: str) -> None:
    """Evaluation acts by the learned means: the same weights in a plain network return the same."""
    noisy, plain = make_config(algorithm, True), make_config(algorithm, False)
    specs = build_world(noisy.world, 1, 0).specs
    torch.manual_seed(0)
    networks = {
        agent: network_class(algorithm)(spec, noisy.learner.network).state_dict()
        for agent, spec in specs.items()
    }
    weights = {
        agent: PolicyWeights(1, {name: tensor.numpy() for name, tensor in state.items()})
        for agent, state in networks.items()
    }
    without_sigma = {
        agent: PolicyWeights(1, {name: array for name, array in own.tensors.items() if "_sigma" not in name})
        for agent, own in weights.items()
    }
    found = greedy_returns(noisy, weights, episodes=6, seed=5)
    expected = greedy_returns(plain, without_sigma, episodes=6, seed=5)
    for agent, returns in expected.items():
        np.testing.assert_array_equal(found[agent], returns)
        assert len(returns) == 6
