"""Which replay service keeps which agent (MISSION R11)."""

from __future__ import annotations

from collections.abc import Iterable

from shared.config import Config
from shared.errors import ConfigError


def replay_of(config: Config, agents: Iterable[str], agent: str) -> int:
    """The number of the replay service that keeps this learning agent's buffer, one of all `agents`.

    It is what `replay.placement` says. The agents that it does not name, sorted by name as text, take turns
    over all services, those that it names included: the first goes to service 0, the next to service 1, and
    after the last service it is the turn of service 0 again. Agents that learn nothing have no buffer and
    take no turn.
    """
    services, listed = config.replay.services, len(config.endpoints.replay)
    if listed != services:  # never in a run of the launcher, which lists them itself
        raise ConfigError(
            f"replay.services = {services}, but endpoints.replay lists {listed}: "
            "write one entry with segments and requests there for each replay service"
        )
    if not config.learns(agent):
        raise ConfigError(f"{agent} is {config.algorithm_of(agent)}: no replay service keeps it")
    placement = config.replay.placement
    if agent in placement:
        return placement[agent]
    taking_turns = sorted(other for other in set(agents) - set(placement) if config.learns(other))
    return taking_turns.index(agent) % services
