"""Which replay service keeps which agent (MISSION R11)."""

from __future__ import annotations

from collections.abc import Iterable

from shared.config import Config


def replay_of(config: Config, agents: Iterable[str], agent: str) -> int:
    """The number of the replay service that keeps this agent's buffer: agents take turns in name order."""
    return sorted(agents).index(agent) % len(config.endpoints.replay)
