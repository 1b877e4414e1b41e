"""Who is there: the last heartbeat of every service of the run, in memory only.

A restarted parameter server knows nobody until they speak, which takes a second. There is one entry for each
instance: a new incarnation takes the place of the one that died.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Heartbeat, ServiceStatus

FORGET_AFTER_LEASES = 6  # a silent service leaves the roster after this many lease times


@dataclass(frozen=True, slots=True)
class Seen:
    """The last heartbeat of a service, and the way back to it."""

    peer: bytes
    heartbeat: Heartbeat
    at: float


class Roster:
    """The services that have been heard of."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[tuple[str, str], Seen] = {}  # by service and instance

    def note(self, heartbeat: Heartbeat, peer: bytes, now: float) -> None:
        """A heartbeat came; one that says `done` is a goodbye."""
        key = (heartbeat.service, heartbeat.instance)
        if heartbeat.done:
            self._seen.pop(key, None)
        else:
            self._seen[key] = Seen(peer, heartbeat, now)

    def remove(self, instance: str, incarnation: str | None) -> None:
        """A service was seen to end (only this incarnation of it, if one is given)."""
        for key, seen in list(self._seen.items()):
            if key[1] == instance and incarnation in (None, seen.heartbeat.incarnation):
                del self._seen[key]

    def forget_silent(self, now: float) -> None:
        oldest = now - FORGET_AFTER_LEASES * self._lease_s
        for key in [key for key, seen in self._seen.items() if seen.at < oldest]:
            del self._seen[key]

    def find(self, instance: str) -> Seen | None:
        return next((seen for (_service, name), seen in self._seen.items() if name == instance), None)

    @property
    def instances(self) -> list[str]:
        return sorted(instance for _service, instance in self._seen)

    def statuses(self, now: float) -> list[ServiceStatus]:
        return [_status(seen, now) for seen in self._seen.values()]


def _status(seen: Seen, now: float) -> ServiceStatus:
    beat = seen.heartbeat
    holds = beat.token.agent if beat.token else f"index {beat.index}" if beat.index is not None else ""
    return ServiceStatus(
        service=beat.service,
        instance=beat.instance,
        incarnation=beat.incarnation,
        pid=beat.pid,
        host=beat.host,
        up_s=beat.up_s + now - seen.at,
        seen_s=now - seen.at,
        ready=beat.ready,
        done=beat.done,
        holds=holds,
        waiting_for=beat.waiting_for,
        metrics=beat.metrics,
    )
