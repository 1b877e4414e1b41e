"""Where snapshots are ordered: the one that is being taken, and everybody who waits for it.

One at a time. An order is held until its snapshot is on the disk; a repeated order waits once, and one for a
number that was taken already is answered from the disk, so orders are harmless when they arrive twice. A
snapshot that fails is refused with the reason and leaves nothing behind; the service goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.replay import snapshot_files
from services.replay.buffer import AgentBuffer
from services.replay.snapshot import Snapshot
from services.replay.snapshot_files import Manifest
from shared.errors import Refused
from shared.links.requests import Incoming, RequestReceiver
from shared.logs import get_logger
from shared.messages import SnapshotOrder, SnapshotTaken

log = get_logger()

HOLD_SHARE = 0.9  # of its deadline an order is held
NUMBERS_AHEAD = 1_000  # of the newest here: another replay service may have had more snapshots


@dataclass(slots=True)
class HeldOrder:
    """Somebody who waits for the snapshot that is being taken."""

    peer: bytes
    message: SnapshotOrder
    until: float


class SnapshotDesk:
    """The snapshots of one replay service. `requests` is set once its link is open."""

    requests: RequestReceiver

    def __init__(
        self, replay: Path, service: int, buffers: Mapping[str, AgentBuffer], on_written: Callable[[], None]
    ) -> None:
        self._replay, self._service, self._buffers = replay, service, buffers
        self._root = snapshot_files.root_of(replay)
        self._on_written = on_written
        self._snapshot: Snapshot | None = None
        self._orders: list[HeldOrder] = []
        snapshot_files.remove_drafts(self._root, service)

    def on_snapshot_order(self, message: SnapshotOrder, incoming: Incoming) -> None:
        if self._snapshot is None:
            manifests = self._taken(message.number)
            if manifests is not None:
                self.requests.reply(incoming.peer, snapshot_taken(message, manifests))
                return
            self._begin(message.number)
        self._hold(message, incoming)

    def advance(self) -> bool:
        """Copies for a moment; True when it could go on at once."""
        snapshot = self._snapshot
        if snapshot is None:
            return False
        try:
            more = snapshot.advance()
        except Refused as error:
            self._fail(error)
            return False
        if snapshot.done:
            self._finish(snapshot)
        return more

    def expire_orders(self, now: float) -> None:
        """The snapshot goes on: whoever asks for its number again hears of it."""
        overdue = [order for order in self._orders if order.until <= now]
        self._orders = [order for order in self._orders if order.until > now]
        for order in overdue:
            reason = f"snapshot {order.message.number} is not on the disk yet"
            self.requests.refuse(order.peer, order.message, Refused("deadline", reason))

    def newest(self) -> int:
        """The highest number of which this service has anything on its disk; 0: it has no snapshot."""
        return max((known for known in snapshot_files.numbers(self._root) if self._begun(known)), default=0)

    def end(self) -> None:
        """The service ends, and with it what was begun."""
        if self._snapshot is not None:
            self._fail(
                Refused(
                    "snapshot_unfinished", f"replay ends before snapshot {self._snapshot.number} is whole"
                )
            )

    def _taken(self, number: int) -> dict[str, Manifest] | None:
        """What is on the disk under this number; None: nothing yet. Refuses one that can no longer be."""
        newest = self.newest()
        if number > newest + NUMBERS_AHEAD:
            reason = f"snapshot {number}, where the newest is {newest}: every later one would be below it"
            raise Refused("snapshot_number", reason)
        if number > newest:
            return None
        try:
            return {
                agent: snapshot_files.read_manifest(self._root / str(number) / agent)
                for agent in self._buffers
            }
        except snapshot_files.DamagedSnapshotError as error:
            reason = f"snapshot {number} is not here whole ({error}); take one above {newest}"
            raise Refused("snapshot_number", reason) from None

    def _begun(self, number: int) -> bool:
        """Whether any agent of this service has its place under this number."""
        return any((self._root / str(number) / agent).exists() for agent in self._buffers)

    def _begin(self, number: int) -> None:
        self._snapshot = Snapshot(self._replay, self._service, number, self._buffers, self._on_written)
        log.info("snapshot begun", number=number)

    def _hold(self, message: SnapshotOrder, incoming: Incoming) -> None:
        assert self._snapshot is not None
        if message.number != self._snapshot.number:
            reason = f"snapshot {self._snapshot.number} is being taken; ask again when it is done"
            raise Refused("snapshot_busy", reason)
        held = ((order.peer, order.message.request) for order in self._orders)
        if (incoming.peer, message.request) not in held:
            until = time.monotonic() + HOLD_SHARE * message.deadline_s
            self._orders.append(HeldOrder(incoming.peer, message, until))

    def _finish(self, snapshot: Snapshot) -> None:
        log.info(
            "snapshot taken",
            number=snapshot.number,
            steps={agent: manifest.steps for agent, manifest in snapshot.manifests.items()},
            size_bytes=sum(manifest.size_bytes for manifest in snapshot.manifests.values()),
            took_s=round(time.monotonic() - snapshot.started, 3),
            longest_slice_ms=round(1e3 * snapshot.longest_slice_s, 3),
        )
        for order in self._close():
            self.requests.reply(order.peer, snapshot_taken(order.message, snapshot.manifests))

    def _fail(self, error: Refused) -> None:
        if self._snapshot is not None:
            self._snapshot.abandon()
        for order in self._close():
            self.requests.refuse(order.peer, order.message, error)

    def _close(self) -> list[HeldOrder]:
        self._snapshot = None
        orders, self._orders = self._orders, []
        return orders


def snapshot_taken(order: SnapshotOrder, manifests: Mapping[str, Manifest]) -> SnapshotTaken:
    """The answer to everybody who ordered this snapshot."""
    return SnapshotTaken(
        request=order.request,
        number=order.number,
        steps={agent: manifest.steps for agent, manifest in manifests.items()},
        size_bytes=sum(manifest.size_bytes for manifest in manifests.values()),
    )
