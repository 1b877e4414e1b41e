"""What of a new version is broadcast: all of it, or what differs from the last full one.

Owns, for each agent, the last full version and the last thing sent. A delta is always against the last full
version, so the newest message is enough for a subscriber that holds that one. In half precision float32
tensors travel as float16 unless they would overflow. One rule serves both ends: float16 on the wire is
float32 where it is held, and the checksum is that of the state as held. `shared/weights_state.py` is the
other end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.param_server.version_file import StoredVersion, tensors_checksum
from shared.codec import Array
from shared.weights_state import held_layout, same_bytes, widened

BroadcastDType = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """The contents of one Weights message: a full version, or what differs from `base`."""

    agent: str
    version: int
    updates: int
    base: int | None
    tensors: dict[str, Array]
    checksum: int  # of the state that a subscriber holds after it


@dataclass(slots=True)
class _Sent:
    token: int
    full: Broadcast
    last: Broadcast


class BroadcastEncoder:
    """Decides between full and delta, version by version."""

    def __init__(self, *, delta: bool, full_every: int, broadcast_dtype: BroadcastDType) -> None:
        self._delta = delta
        self._full_every = full_every
        self._half = broadcast_dtype == "float16"
        self._sent: dict[str, _Sent] = {}

    def encode(self, stored: StoredVersion) -> Broadcast:
        """What to broadcast for this version; one that is not newer than the last gives the last again."""
        sent = self._sent.get(stored.agent)
        if sent is not None and stored.version <= sent.last.version:
            return sent.last
        full = self.full(stored)
        if sent is None or not self._may_be_delta(sent, stored):
            self._sent[stored.agent] = _Sent(stored.token, full, full)
            return full
        changed = {
            name: array
            for name, array in full.tensors.items()
            if not same_bytes(array, sent.full.tensors[name])
        }
        if len(changed) == len(full.tensors):  # as large as a full one, and a full one needs no base
            self._sent[stored.agent] = _Sent(stored.token, full, full)
            return full
        sent.last = Broadcast(
            stored.agent, stored.version, stored.updates, sent.full.version, changed, full.checksum
        )
        return sent.last

    def full(self, stored: StoredVersion) -> Broadcast:
        """The whole version in the broadcast's precision: snapshots too must be able to serve as a base."""
        tensors = _halved(stored.tensors) if self._half else stored.tensors
        held = {name: widened(array) for name, array in tensors.items()}
        as_stored = all(held[name] is array for name, array in stored.tensors.items())
        total = stored.checksum if as_stored else tensors_checksum(held)
        return Broadcast(stored.agent, stored.version, stored.updates, None, tensors, total)

    def base(self, agent: str, version: int) -> Broadcast | None:
        """The last full broadcast, if it is this version: answers for a base that the store has pruned."""
        sent = self._sent.get(agent)
        return sent.full if sent is not None and sent.full.version == version else None

    def _may_be_delta(self, sent: _Sent, stored: StoredVersion) -> bool:
        return (
            self._delta
            and stored.token == sent.token
            and stored.version - sent.full.version < self._full_every
            and held_layout(stored.tensors) == held_layout(sent.full.tensors)
        )


def _halved(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: _half(array) for name, array in tensors.items()}


def _half(array: Array) -> Array:
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.array_equal(np.isfinite(half), np.isfinite(array)):
        return array  # beyond float16's range: this tensor travels whole
    half.flags.writeable = False
    return half
