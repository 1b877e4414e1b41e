"""The world in the README can be built and played as it stands."""

from pathlib import Path

from services.actor.rollout import Rollout
from shared.config import load_config
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
