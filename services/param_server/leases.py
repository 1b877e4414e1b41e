"""Who learns for which agent, and which index each actor has.

Owns the lease file. A lease lasts `lease_s` past each renewal; its number rises with every grant and is on
disk before anybody learns of it, so a token with a lower number can be refused for ever after. Times are
monotonic seconds and never stored: after a restart every lease that was live is live for one lease time more.
A lapsed lease that nobody took can be renewed by its old holder; a released one cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import pydantic
from pydantic import BaseModel, ConfigDict

from services.param_server.atomic_file import remove_leftover, write_atomic
from shared.errors import BrokenInvariant, Refused, StaleToken
from shared.messages import Token

Role = Literal["learner", "actor"]
Key = tuple[Role, str]


class Lease(BaseModel):
    """The last grant of one agent (role learner) or of one index (role actor)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    name: str  # the agent, or the index in digits
    number: int
    instance: str = ""
    incarnation: str = ""  # empty: given back
    live: bool = False

    @property
    def key(self) -> Key:
        return self.role, self.name

    @property
    def token(self) -> Token:
        return Token(agent=self.name, number=self.number)

    @property
    def index(self) -> int:
        return int(self.name)


class _LeaseFile(BaseModel):
    leases: tuple[Lease, ...] = ()


class LeaseBook:
    """Grants, renews, lapses. `clock` is asked once, when the book is opened."""

    def __init__(self, path: Path, lease_s: float, clock: Callable[[], float]) -> None:
        self._path = path
        self._lease_s = lease_s
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftover(path)
        self._leases: dict[Key, Lease] = {lease.key: lease for lease in _read(path)}
        grace = clock() + lease_s
        self._deadlines: dict[Key, float] = {key: grace for key, lease in self._leases.items() if lease.live}

    def grant_learner(
        self, agents: Sequence[str], instance: str, incarnation: str, wanted: str | None, now: float
    ) -> Token | None:
        """An agent to learn for: the one wanted, or any free one; None while all of them are held.

        Asking again gives the same lease. With `wanted` one process may come to hold several agents.
        """
        if wanted is not None and wanted not in agents:
            raise Refused("unknown_agent", f"agent {wanted!r} is not one of {sorted(agents)}")
        candidates = [wanted] if wanted is not None else agents
        lease = self._held_by(incarnation, [("learner", agent) for agent in candidates])
        if lease is not None:
            return self._extend(lease, now).token
        free = [agent for agent in candidates if not self._is_live(("learner", agent), now)]
        if not free:
            return None
        # A silent holder may come back: an agent that nobody holds is the better choice.
        agent = min(free, key=lambda agent: self._has_holder(("learner", agent)))
        return self._grant(("learner", agent), instance, incarnation, now).token

    def grant_actor(self, instance: str, incarnation: str, now: float) -> int:
        """The lowest free index. Asking again gives the same one."""
        lease = self._held_by(incarnation, [key for key in self._leases if key[0] == "actor"])
        if lease is not None:
            return self._extend(lease, now).index
        index = 0
        while self._is_live(("actor", str(index)), now):
            index += 1
        return self._grant(("actor", str(index)), instance, incarnation, now).index

    def renew(self, incarnation: str, token: Token | None, index: int | None, now: float) -> bool:
        """Whether everything named is (again) held by this incarnation, for one lease time from now."""
        leases = []
        if token is not None:
            leases.append(self._leases.get(("learner", token.agent)))
        if index is not None:
            leases.append(self._leases.get(("actor", str(index))))
        own = [lease for lease in leases if lease is not None and lease.incarnation == incarnation]
        if not leases or len(own) != len(leases):
            return False
        if token is not None and own[0].number != token.number:
            return False
        for lease in own:
            self._extend(lease, now)
        return True

    def release(self, instance: str, incarnation: str | None = None) -> list[Lease]:
        """Gives back what this instance (or only this incarnation of it) holds; returns what that was."""
        given_back = [
            lease
            for lease in self._leases.values()
            if lease.incarnation and lease.instance == instance and incarnation in (None, lease.incarnation)
        ]
        self._store([Lease(role=lease.role, name=lease.name, number=lease.number) for lease in given_back])
        return given_back

    def expire(self, now: float) -> list[Lease]:
        """Marks silent leases as lapsed; returns them."""
        lapsed = [self._leases[key] for key, deadline in self._deadlines.items() if deadline <= now]
        self._store([lease.model_copy(update={"live": False}) for lease in lapsed])
        return lapsed

    def check(self, token: Token) -> None:
        """Refuses a token that a newer grant has replaced, or that was never granted."""
        lease = self._leases.get(("learner", token.agent))
        if lease is None:
            raise Refused("unknown_agent", f"no learner was ever given agent {token.agent!r}")
        if token.number < lease.number:
            raise StaleToken(
                f"token {token.number} of agent {token.agent!r} was replaced by {lease.number}; "
                "ask for a new lease"
            )
        if token.number > lease.number:
            raise Refused(
                "unknown_token",
                f"token {token.number} of agent {token.agent!r} was never granted; "
                f"the newest is {lease.number}",
            )

    def holder(self, agent: str) -> Lease | None:
        """The live lease of an agent, as of the last `expire`."""
        lease = self._leases.get(("learner", agent))
        return lease if lease is not None and lease.live else None

    def tokens(self, now: float) -> dict[str, int]:
        """The live number of every agent that was ever leased; 0: nobody learns for it."""
        return {
            lease.name: lease.number if self._is_live(key, now) else 0
            for key, lease in self._leases.items()
            if lease.role == "learner"
        }

    def live(self, now: float) -> list[Lease]:
        return [lease for key, lease in self._leases.items() if self._is_live(key, now)]

    def learners(self) -> dict[str, Lease]:
        """The newest lease of every agent that was ever leased, live or not."""
        return {lease.name: lease for lease in self._leases.values() if lease.role == "learner"}

    def is_live(self, lease: Lease, now: float) -> bool:
        return self._is_live(lease.key, now)

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do."""
        return min(self._deadlines.values(), default=None)

    def _is_live(self, key: Key, now: float) -> bool:
        return key in self._deadlines and now < self._deadlines[key]

    def _has_holder(self, key: Key) -> bool:
        return key in self._leases and bool(self._leases[key].incarnation)

    def _held_by(self, incarnation: str, keys: Iterable[Key]) -> Lease | None:
        leases = (self._leases[key] for key in keys if key in self._leases)
        return next((lease for lease in leases if lease.incarnation == incarnation), None)

    def _grant(self, key: Key, instance: str, incarnation: str, now: float) -> Lease:
        before = self._leases.get(key)
        lease = Lease(
            role=key[0],
            name=key[1],
            number=before.number + 1 if before else 1,
            instance=instance,
            incarnation=incarnation,
            live=True,
        )
        self._store([lease])
        self._deadlines[key] = now + self._lease_s
        return lease

    def _extend(self, lease: Lease, now: float) -> Lease:
        if not lease.live:
            lease = lease.model_copy(update={"live": True})
            self._store([lease])
        self._deadlines[lease.key] = now + self._lease_s
        return lease

    def _store(self, changed: Sequence[Lease]) -> None:
        """Disk first: nobody may hear of a grant that a crash could undo."""
        if not changed:
            return
        leases = self._leases | {lease.key: lease for lease in changed}
        write_atomic(self._path, _LeaseFile(leases=tuple(leases.values())).model_dump_json().encode())
        self._leases = leases
        for lease in changed:
            if not lease.live:
                self._deadlines.pop(lease.key, None)


def _read(path: Path) -> tuple[Lease, ...]:
    try:
        return _LeaseFile.model_validate_json(path.read_bytes()).leases
    except FileNotFoundError:
        return ()
    except pydantic.ValidationError as error:
        raise BrokenInvariant(
            f"{path.name} is damaged ({error.error_count()} problems): without it a number could be granted "
            "twice; restore it from a backup"
        ) from None
