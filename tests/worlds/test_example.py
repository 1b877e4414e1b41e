"""The example worlds can be built and played as they stand; one of them is printed in the README."""

from pathlib import Path

import numpy as np
import pytest

from examples.archery import HOLD, LONG_BOW, SHORT_BOW, Archery
from services.actor.rollout import Rollout
from shared.config import load_config
from worlds.copies import SingleAction
from worlds.registry import build_world


def test_corridor_example_plays_epochs():
    """The example goes through the same checks and the same rollout as any world of a user."""
    config = load_config(
        settings=["world.name=examples.corridor:corridor", "world.agents=2", "world.max_turns=20"],
        environment={},
    )
    world = build_world(config.world, envs=3, seed=1)
    rollout = Rollout(config, world, actor_index=0, first_epoch=0)
    owned = sum(cut.owned for _ in range(40) for _agent, cut in rollout.turn(0.0))
    assert rollout.played.epochs == 6
    assert owned == 40 * 3 * 2


def test_readme_shows_the_example_as_it_is():
    """What the README prints is the file, from its first import on."""
    root = Path(__file__).parents[2]
    example = (root / "examples" / "corridor.py").read_text()
    assert example[example.index("import random") :].strip() in (root / "README.md").read_text()


@pytest.mark.parametrize(
    ("target", "bow", "aim", "reward"),
    [
        ((0.5, 0.0, 1.0), SHORT_BOW, 0.5, 0.8),  # no wind at a near target
        ((0.5, 1.0, 1.0), LONG_BOW, 0.2, 0.8),  # the wind carries it 0.3 further
        ((0.5, 0.0, 0.0), SHORT_BOW, 0.25, 0.3),
        ((0.5, 0.0, 0.0), SHORT_BOW, -0.5, -0.2),
        ((0.5, 0.0, 0.0), LONG_BOW, 0.5, -0.2),
        ((0.5, 0.0, 0.0), HOLD, 0.5, 0.0),
    ],
)
def test_archery_pays_the_right_bow_by_how_near_the_aim_is(target, bow, aim, reward):
    """Both parts of the action count, and holding costs nothing."""
    world = Archery(seed=0, agents=1, max_turns=50)
    world.targets = {"agent_0": target}
    found = world.act({"agent_0": SingleAction(bow, np.array([aim], np.float32))})
    assert found == {"agent_0": (pytest.approx(reward), False)}
