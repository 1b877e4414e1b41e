"""Worlds: what is played. `World` is the contract, `build_world` makes one from the config."""

from worlds.base import AgentActions, Outcome, Script, World, agent_ids
from worlds.copies import Copies, SingleAction, SingleWorld
from worlds.registry import build_world, check_world
from worlds.treasure_hunt import TreasureHunt

__all__ = [
    "AgentActions",
    "Copies",
    "Outcome",
    "Script",
    "SingleAction",
    "SingleWorld",
    "TreasureHunt",
    "World",
    "agent_ids",
    "build_world",
    "check_world",
]
