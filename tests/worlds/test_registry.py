"""The registry: from a config to a world, and what it says when that cannot be."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from shared.config import WorldConfig
from shared.errors import ConfigError, WorldError
from shared.specs import AgentSpec, Continuous, vector_observation
from worlds.base import Outcome, World, agent_ids
from worlds.copies import Copies
from worlds.registry import build_world
from worlds.treasure_hunt import TreasureHunt

MODULE = "worlds_brought_by_a_user"
SPEC = AgentSpec(observation=vector_observation(2), continuous=Continuous(size=1, low=0.5, high=2.0))


class Small(World):
    """The least world that is right; tests break one thing at a time."""

    def __init__(self, envs, seed, agents, max_turns, *, speed=1):
        self.specs = dict.fromkeys(agent_ids(agents), SPEC)
        self.envs, self.max_turns, self.speed = envs, max_turns, speed
        self.controls = []

    def reset(self, slots):
        pass

    def begin_turn(self, slots):
        pass

    def observe(self):
        return {agent: np.zeros((self.envs, 2), dtype=np.float32) for agent in self.specs}

    def act(self, actions):
        self.controls += [action.continuous for action in actions.values()]
        reward, never = np.zeros(self.envs, dtype=np.float32), np.zeros(self.envs, dtype=np.bool_)
        return {agent: Outcome(reward, never) for agent in self.specs}


@pytest.fixture
def bring(monkeypatch):
    """Makes a factory importable and returns the config that names it."""

    def as_config(factory, **options):
        module = ModuleType(MODULE)
        module.factory = factory
        monkeypatch.setitem(sys.modules, MODULE, module)
        return WorldConfig(name=f"{MODULE}:factory", agents=2, options=options)

    return as_config


def test_builtin_name_builds_the_same_hunt_as_by_hand():
    """The config's agents, turns and options reach the world, and its seed is used untouched."""
    config = WorldConfig(agents=2, max_turns=7, options={"size": 6, "items": {"gem": 10, "bone": -10}})
    world = build_world(config, envs=3, seed=5)
    by_hand = TreasureHunt(3, 5, agents=2, size=6, items={"gem": 10, "bone": -10})
    assert isinstance(world, TreasureHunt)
    assert (world.envs, world.max_turns, list(world.specs)) == (3, 7, ["agent_0", "agent_1"])
    assert (world.cells == by_hand.cells).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tresure_hunt", "did you mean treasure_hunt"),
        ("chess", "Known are treasure_hunt"),
        ("__import__('os')", "no built-in world has this name"),
        (":factory", "package.module:factory"),
        ("no_such_module_at_all:factory", "importing no_such_module_at_all failed"),
        (".relative:factory", "importing .relative failed"),
        ("worlds.treasure_hunt:TreasureHnt", "did you mean TreasureHunt"),
        ("worlds.treasure_hunt:WALL", "is a int, not a function or class"),
    ],
)
def test_wrong_name_is_refused_with_what_is_known(name, message):
    """The error names the value and what to write instead."""
    with pytest.raises(ConfigError, match=message) as refusal:
        build_world(WorldConfig(name=name), envs=1, seed=0)
    assert repr(name) in str(refusal.value)


def test_unknown_option_names_the_nearest_one():
    """A misspelt option is refused with the one that was probably meant."""
    with pytest.raises(ConfigError, match=r"world\.options\.gem_probabilty.*did you mean gem_probability"):
        build_world(WorldConfig(options={"gem_probabilty": 0.1}), envs=1, seed=0)


def test_option_that_is_a_setting_elsewhere_points_there():
    """agents in options would collide with world.agents."""
    with pytest.raises(ConfigError, match=r"set world\.agents instead"):
        build_world(WorldConfig(options={"agents": 4}), envs=1, seed=0)


def test_own_factory_with_options_is_built_and_checked(bring):
    """An importable factory gets its options; the trial turn respects the bounds of its actions."""
    world = build_world(bring(Small, speed=3), envs=4, seed=0)
    assert isinstance(world, Small)
    assert world.speed == 3
    assert all((control == 0.5).all() and control.shape == (4, 1) for control in world.controls)


def test_own_factory_of_copies_is_built(bring):
    """An ordinary environment comes in through a factory of a few lines."""

    class Single:
        max_turns = 50
        specs = {"agent_0": SPEC, "agent_1": SPEC}  # noqa: RUF012

        def __init__(self, seed):
            pass

        def reset(self):
            pass

        def begin_turn(self):
            pass

        def observe(self):
            return {agent: np.zeros(2) for agent in self.specs}

        def act(self, actions):
            return dict.fromkeys(actions, (1.0, False))

    world = build_world(bring(lambda envs, seed, **_: Copies(Single, envs, seed)), envs=2, seed=0)
    assert isinstance(world, Copies)


def test_factory_that_needs_an_option_names_it(bring):
    """A parameter without default must be in the options."""
    with pytest.raises(ConfigError, match=r"needs a value for world\.options\.level"):
        build_world(bring(lambda envs, seed, agents, max_turns, level: None), envs=1, seed=0)


def test_factory_without_a_given_parameter_is_refused(bring):
    """A factory that cannot be called as agreed says which parameters it lacks."""
    with pytest.raises(WorldError, match="does not take agents, max_turns"):
        build_world(bring(lambda envs, seed: None), envs=1, seed=0)


def broken(**changes):
    return type("Broken", (Small,), changes)


def changed(world, **attributes):
    vars(world).update(attributes)
    return world


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda **_: object(), "returned a object, not a World"),
        (lambda **k: changed(Small(**k), envs=9), "has envs = 9, but was built with envs = 4"),
        (lambda **k: changed(Small(**k), max_turns=None), "max_turns = None"),
        (lambda **k: changed(Small(**k), specs=[]), "expected a mapping"),
        (lambda **k: changed(Small(**k), specs={"agent_0": SPEC}), r"world\.agents = 2 means"),
        (lambda **k: changed(Small(**k), specs=dict.fromkeys(["a", "b"], SPEC)), r"\['agent_0', 'agent_1'\]"),
        (
            lambda **k: changed(Small(**k), specs=dict.fromkeys(agent_ids(2))),
            "is a NoneType, not an AgentSpec",
        ),
        (broken(observe=lambda self: {}), r"observe\(\) returned \[\]"),
        (broken(observe=lambda self: None), r"observe\(\) returned NoneType"),
        (
            broken(observe=lambda self: dict.fromkeys(self.specs, np.zeros((4, 2)))),
            r"observation of agent_0 is float64\[4, 2\], but should be float32\[4, 2\]",
        ),
        (
            broken(observe=lambda self: dict.fromkeys(self.specs, np.zeros(2, dtype=np.float32))),
            r"float32\[2\], but should be float32\[4, 2\]",
        ),
        (broken(observe=lambda self: {agent: [0, 0] for agent in self.specs}), "is a list, not an array"),
        (broken(act=lambda self, actions: dict.fromkeys(self.specs, (0, 0))), "a tuple, not an Outcome"),
        (
            broken(act=lambda self, actions: dict.fromkeys(self.specs, Outcome(np.zeros(4), np.zeros(4)))),
            r"reward of agent_0 is float64\[4\]",
        ),
    ],
)
def test_factory_with_broken_world_says_what_is_wrong(bring, factory, message):
    """Whatever a world gets wrong is found before training, and named."""
    with pytest.raises(WorldError, match=message):
        build_world(bring(factory), envs=4, seed=0)
