"""Algorithms by name: built in, or a user's own class as the README shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.actor.policies import PolicyGroup
from services.learner.algorithms import build_algorithm
from services.learner.algorithms.base import Algorithm
from shared.algorithms import BUILT_IN, algorithm_class, network_class
from shared.config import LearnerConfig, load_config
from shared.errors import ConfigError
from shared.networks import PolicyNetwork
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(2), discrete=Discrete(n=2))
CPU = torch.device("cpu")
EXAMPLE = "examples.expected_sarsa:ExpectedSarsa"

MODULE = """
from services.learner.algorithms.base import Algorithm
from services.learner.algorithms.dqn import DQN


class NoNetwork(Algorithm):
    def loss(self, batch):
        raise NotImplementedError


class OddNetwork(DQN):
    network = dict


class NoLoss(Algorithm):
    network = DQN.network


class Stranger:
    network = DQN.network


def not_a_class(*arguments):
    return None
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a user's, importable as it would be from PYTHONPATH."""
    (tmp_path / "my_algorithms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_algorithms"
    sys.modules.pop("my_algorithms", None)


def build(name: str, spec: AgentSpec = SPEC, **changes: Any) -> Algorithm:
    settings: dict[str, Any] = {"network": {"hidden": [2], "dueling": False}, "reward_scale": 1.0}
    return build_algorithm(
        spec, LearnerConfig.model_validate(settings | changes | {"algorithm": name}), CPU, 0
    )


# --- every algorithm there is -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BUILT_IN, EXAMPLE])
def test_algorithm_and_actor_have_the_same_network(name: str) -> None:
    """What a learner publishes is what an actor of the same config can load."""
    spec = SPEC
    try:
        algorithm = build(name)
    except ConfigError:  # one that needs a continuous action as well
        spec = SPEC.model_copy(update={"continuous": Continuous(size=1)})
        algorithm = build(name, spec)
    assert type(algorithm.online) is network_class(name)
    group = PolicyGroup(("agent_0", "agent_1"), spec, algorithm.config, 3)
    for agent in group.agents:
        group.load(agent, 1, {key: tensor.numpy() for key, tensor in algorithm.policy().items()})
    group.observe([np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)] * 2)
    first, second = group.best_actions()
    alone = algorithm.online.eval().act(torch.from_numpy(group.stacks[0, :, 0]))
    assert alone.discrete is not None
    np.testing.assert_array_equal(first.discrete, alone.discrete.numpy())
    np.testing.assert_array_equal(first.discrete, second.discrete)


# --- one's own --------------------------------------------------------------------------------------------


def test_example_bootstraps_from_what_an_exploring_agent_expects() -> None:
    """(1 - epsilon) times the best action's value and epsilon times the mean, by hand."""
    algorithm = build(EXAMPLE, options={"epsilon": 0.2}, double=False)
    identity = {
        "body.0.weight": torch.eye(2),
        "body.0.bias": torch.zeros(2),
        "head.weight": torch.eye(2),
        "head.bias": torch.zeros(2),
    }
    algorithm.load_policy(identity)
    batch = {
        "observation": np.array([[[1.0, 2.0]]], np.float32),
        "next_observation": np.array([[[3.0, 5.0]]], np.float32),
        "action": np.array([0]),
        "return": np.array([10.0], np.float32),
        "discount": np.array([0.5], np.float32),
        "weight": np.ones(1, np.float32),
    }
    report = algorithm.update(batch)
    assert report is not None
    target = 10.0 + 0.5 * (0.8 * 5.0 + 0.2 * 4.0)
    np.testing.assert_allclose(report.priorities, [target - 1.0], rtol=1e-6)


def test_options_of_an_own_algorithm_come_from_the_config() -> None:
    """Whatever is set under learner.options is left as it is, for the class to read."""
    config = load_config(
        settings=[f"learner.algorithm={EXAMPLE}", "learner.options={epsilon: 0.3}"], environment={}
    )
    algorithm = build_algorithm(SPEC, config.learner, CPU, 0)
    assert algorithm.config.options == {"epsilon": 0.3}


def test_readme_shows_the_example_as_it_is() -> None:
    """What the README prints is the file, from its first import on."""
    root = Path(__file__).parents[2]
    example = (root / "examples" / "expected_sarsa.py").read_text()
    assert example[example.index("from torch") :].strip() in (root / "README.md").read_text()


# --- names that are wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:Mine", r"importing no_such_module failed .* PYTHONPATH"),
        (".relative:Mine", r"importing \.relative failed"),
        ("examples.expected_sarsa:ExpectedSarse", r"has no 'ExpectedSarse'; did you mean ExpectedSarsa\?"),
        ("my_algorithms:NoNetwork", r"'my_algorithms:NoNetwork' has network = None: name a subclass of"),
        ("my_algorithms:OddNetwork", r"has network = <class 'dict'>: name a subclass of"),
        ("my_algorithms:NoLoss", r"has no method `loss`"),
        ("my_algorithms:Stranger", r"Stranger.*write a subclass of .*base\.Algorithm"),
        ("my_algorithms:not_a_class", r"not_a_class.*write a subclass of .*base\.Algorithm"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_learner_with_a_wrong_name_is_told_what_to_do(name: str, says: str) -> None:
    """Each mistake has its own sentence, with the name as the config has it."""
    with pytest.raises(ConfigError, match=says):
        build(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:Mine", r"importing no_such_module failed"),
        ("my_algorithms:Nobody", r"module my_algorithms has no 'Nobody'"),
        ("my_algorithms:NoNetwork", r"has network = None"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_actor_with_a_wrong_name_is_told_what_to_do(name: str, says: str) -> None:
    """An actor needs only the network, and says what keeps it from it."""
    with pytest.raises(ConfigError, match=says):
        PolicyGroup(("agent_0",), SPEC, LearnerConfig(algorithm=name), 1)


@pytest.mark.parametrize("name", ["dqn", "iqn"])
def test_algorithm_without_a_discrete_action_is_refused_by_name(name: str) -> None:
    """Values of actions need actions to choose from, and the config is what can be changed."""
    spec = AgentSpec(observation=vector_observation(2), continuous=Continuous(size=1))
    with pytest.raises(ConfigError, match=rf"learner\.algorithm = '{name}': .* needs a discrete action"):
        build(name, spec)


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_built_in_name_leads_to_classes_that_belong_together(name: str) -> None:
    """The network that actors build is the one that the learner's class names."""
    found = algorithm_class(name)
    assert issubclass(found, Algorithm)
    assert issubclass(network_class(name), PolicyNetwork)
    assert found.network is network_class(name)
