"""Who is there: the last heartbeat of every service of the run, and who failed, in memory only.

A restarted parameter server knows nobody until they speak, which takes a second. There is one entry for each
instance: a new incarnation takes the place of the one that died.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Failures, Heartbeat, ServiceStatus

FORGET_AFTER_LEASES = 6  # a silent service leaves the roster after this many lease times
MOST_FAILED = 1_000  # instances whose failures are remembered


@dataclass(frozen=True, slots=True)
class Seen:
    """The last heartbeat of a service, and the way back to it."""

    peer: bytes
    heartbeat: Heartbeat
    at: float


@dataclass(frozen=True, slots=True)
class Failed:
    """How often an instance failed, and the last time."""

    count: int
    reason: str
    at: float


class Roster:
    """The services that have been heard of."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[tuple[str, str], Seen] = {}  # by service and instance
        self._failed: dict[str, Failed] = {}  # by instance

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

    def note_failure(self, instance: str, pid: int, reason: str, now: float) -> str | None:
        """Counts it; returns the incarnation of the process that ended, if it was ever heard of."""
        before = self._failed.get(instance)
        if before is None and len(self._failed) >= MOST_FAILED:
            del self._failed[next(iter(self._failed))]
        self._failed[instance] = Failed(before.count + 1 if before else 1, reason, now)
        seen = self.find(instance)
        return seen.heartbeat.incarnation if seen is not None and seen.heartbeat.pid == pid else None

    def failures(self, now: float) -> dict[str, Failures]:
        return {
            instance: Failures(count=failed.count, reason=failed.reason, seen_s=now - failed.at)
            for instance, failed in self._failed.items()
        }

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
