"""Who may train now, where only some agents may at the same time (`parallel.num_workers`)."""

from __future__ import annotations


class Permits:
    """`count` of them; None: as many as are asked for. Those who wait are kept by whoever holds requests."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._holders: set[str] = set()

    def grant(self, agent: str) -> bool:
        """Asking again gives the same one."""
        if self._count is None or agent in self._holders:
            return True
        if len(self._holders) >= self._count:
            return False
        self._holders.add(agent)
        return True

    def give_back(self, agent: str) -> bool:
        """Whether somebody else may have it now."""
        if agent not in self._holders:
            return False
        self._holders.remove(agent)
        return True
