"""What the parameter server tells everyone: PUB (Broadcaster) to SUB (BroadcastListener).

Topics: the run's notices, its status, and one for each agent's weights. PUB drops what a slow subscriber does
not read, and a late subscriber has missed all before; so every notice says the newest version of each agent,
and whoever has an older one asks for a snapshot. A listener drains its queue and hands on only the newest
weights of each agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import zmq

from shared.codec import Received, decode, encode
from shared.errors import BadMessage
from shared.layout import Arrays
from shared.links.network import ConnectionWatch, Network
from shared.logs import get_logger
from shared.messages import Message, RunNotice, RunStatus, Weights

log = get_logger()

QUEUE = 64
# The zero byte ends the topic: subscriptions match by prefix, and agent_1 must not receive agent_10.
NOTICES = b"run\0"
STATUS = b"status\0"


def weights_topic(agent: str) -> bytes:
    """The topic of one agent's weights."""
    return f"weights/{agent}\0".encode()


class Broadcaster:
    """The parameter server's end."""

    def __init__(self, network: Network, endpoint: str, *, run: str) -> None:
        self.counters: Counter[str] = Counter()
        self._run = run
        self._loop = network.loop
        self._socket = network.socket(zmq.PUB, queue=QUEUE)
        network.bind(self._socket, endpoint)
        self._watch = ConnectionWatch(self._socket, "broadcast", self.counters)
        self._loop.on_readable(self._watch.socket, self._watch.receive, told=True)

    def send(self, topic: bytes, message: Message, arrays: Arrays | None = None) -> None:
        frames = encode(message, arrays, self._run)
        self._socket.send_multipart([topic, *frames], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        self._loop.forget(self._watch.socket)
        self._watch.close()
        self._socket.close()


class BroadcastListener:
    """A subscriber's end: calls back for notices and status, and for the newest weights of each agent."""

    def __init__(
        self,
        network: Network,
        endpoint: str,
        *,
        run: str,
        on_notice: Callable[[RunNotice], None] | None = None,
        on_status: Callable[[RunStatus], None] | None = None,
        on_weights: Callable[[Weights, Arrays], None] | None = None,
        agents: Iterable[str] = (),
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._run = run
        self._loop = network.loop
        self._on_notice, self._on_status, self._on_weights = on_notice, on_status, on_weights
        self._socket = network.socket(zmq.SUB, queue=QUEUE)
        topics = [weights_topic(agent) for agent in agents]
        if on_notice:
            topics.append(NOTICES)
        if on_status:
            topics.append(STATUS)
        for topic in topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        network.connect(self._socket, endpoint)
        self._loop.on_readable(self._socket, self.receive, told=True)

    def receive(self) -> None:
        """Drains the queue. Of several weights for one agent only the newest is handed on."""
        newest: dict[str, tuple[Weights, Arrays]] = {}
        for _ in range(4 * QUEUE):
            try:
                _topic, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                received = decode(frames)
            except BadMessage as error:
                self.counters["bad_messages"] += 1
                log.warning("bad broadcast dropped", reason=str(error))
                continue
            self._take(received, newest)
        for message, arrays in newest.values():
            assert self._on_weights is not None
            self._on_weights(message, arrays)

    def close(self) -> None:
        self._loop.forget(self._socket)
        self._socket.close()

    def _take(self, received: Received, newest: dict[str, tuple[Weights, Arrays]]) -> None:
        message = received.message
        if message.run != self._run:
            self.counters["other_run"] += 1
        elif isinstance(message, Weights) and self._on_weights:
            newest[message.agent] = (message, received.arrays)
        elif isinstance(message, RunNotice) and self._on_notice:
            self._on_notice(message)
        elif isinstance(message, RunStatus) and self._on_status:
            self._on_status(message)
        else:
            self.counters["unexpected"] += 1
