"""Questions and answers: DEALER (RequestSender) to ROUTER (RequestReceiver).

Both services that answer, replay and the parameter server, use this link. Queues are bounded on both sides.
When the answering end is gone, questions stay with their sender, who repeats them until they are answered or
their deadline passes; so every question must be harmless when it arrives twice. The ROUTER side never waits:
an answer to a peer that is gone or does not read is dropped and counted, and the peer asks again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import zmq

from shared.codec import Received, decode, encode
from shared.errors import BadMessage, PeerSilent, Refused, RookeryError, StaleToken
from shared.layout import Arrays
from shared.links.frames import more_waits, receive_frames, send_frames
from shared.links.network import ConnectionWatch, Network
from shared.logs import get_logger
from shared.messages import ErrorReply, Hello, Message, Reply, Request

log = get_logger()

QUEUE = 1_000  # messages on the way to or from one peer
MESSAGES_A_TURN = 256  # so that one busy socket cannot starve the others

_NOTHING: Mapping[str, None] = MappingProxyType({})

OnReply = Callable[[Received], None]
OnFailure = Callable[[RookeryError], None]


@dataclass(slots=True)
class _Pending:
    message: Request
    arrays: Arrays | None
    asked: tuple[int, float]  # its number and its deadline
    on_reply: OnReply
    on_failure: OnFailure
    deadline: float
    retry_s: float
    next_send: float
    once: Mapping[str, None]


class RequestSender:
    """The asking end. `ask` never blocks; answers arrive through callbacks during the loop's turns."""

    def __init__(self, network: Network, endpoint: str, *, identity: str) -> None:
        self.endpoint = endpoint
        self.run = ""
        self.volunteered: dict[str, OnReply] = {}  # by kind: what to do with messages nobody asked for
        self.counters: Counter[str] = Counter()
        self._loop = network.loop
        self._socket = network.socket(zmq.DEALER, queue=QUEUE)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        network.connect(self._socket, endpoint)
        self._pending: dict[int, _Pending] = {}
        self._next_request = 1
        self._news = self._loop.on_readable(self._socket, self.receive, told=True)
        self._repeats = self._loop.every(0.25, self._repeat_and_expire)

    def ask(
        self,
        message: Request,
        arrays: Arrays | None = None,
        *,
        on_reply: OnReply,
        on_failure: OnFailure | None = None,
        timeout_s: float = 10.0,
        retry_s: float = 1.0,
        once: Mapping[str, None] = _NOTHING,
    ) -> int:
        """Sends a request and repeats it every `retry_s` until it is answered or `timeout_s` is over.

        `once` names fields that only the first sending has: repeats go without.
        """
        number = self._next_request
        self._next_request += 1
        asked, now = (number, float(timeout_s)), time.monotonic()
        failed = on_failure or _log_failure
        self._pending[number] = _Pending(
            message, arrays, asked, on_reply, failed, now + timeout_s, retry_s, now + retry_s, once
        )
        self._send(message, arrays, asked)
        return number

    def tell(self, message: Message, arrays: Arrays | None = None) -> bool:
        """Sends a message that is not answered. False: the queue is full, it was dropped and counted."""
        return self._send(message, arrays)

    def call(self, message: Request, arrays: Arrays | None = None, timeout_s: float = 10.0) -> Received:
        """Asks and waits for the answer while the loop goes on; for start-up, never inside a handler."""
        outcome: list[Received | RookeryError] = []
        self.ask(message, arrays, on_reply=outcome.append, on_failure=outcome.append, timeout_s=timeout_s)
        while not outcome:
            if self._loop.stopping:
                raise PeerSilent(f"stopped ({self._loop.stop_reason}) while waiting for {self.endpoint}")
            self._loop.turn(block=True)
        if isinstance(outcome[0], RookeryError):
            raise outcome[0]
        return outcome[0]

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def receive(self) -> None:
        """Takes what has arrived, up to a bound."""
        for _ in range(MESSAGES_A_TURN):
            frames = receive_frames(self._socket)
            if frames is None:
                break
            try:
                self._take(decode(frames))
            except BadMessage as error:
                self.counters["bad_messages"] += 1
                log.warning("bad answer dropped", endpoint=self.endpoint, reason=str(error))
            if not more_waits(self._socket):
                break
        else:
            return
        self._news.emptied()

    def close(self) -> None:
        """Open questions are dropped: nobody hears of them again."""
        self._repeats.cancel()
        self._pending.clear()
        self._loop.forget(self._socket)
        self._socket.close()

    def flush(self, timeout_s: float) -> bool:
        """Waits, in the loop, until nothing is asked any more. False: time ran out first."""
        return self._loop.turn_until(lambda: not self._pending, timeout_s)

    def _take(self, received: Received) -> None:
        message = received.message
        pending = self._pending.pop(message.request, None) if isinstance(message, Reply) else None
        if pending is not None:
            if isinstance(message, ErrorReply):
                pending.on_failure(refusal(message))
            else:
                pending.on_reply(received)
            return
        handler = self.volunteered.get(message.kind)  # type: ignore[attr-defined]
        if handler is None:
            self.counters["unexpected"] += 1  # usually the second answer to a repeated question
        else:
            handler(received)

    def _send(self, message: Message, arrays: Arrays | None, asked: tuple[int, float] | None = None) -> bool:
        self._news.used()
        try:
            send_frames(self._socket, encode(message, arrays, self.run, asked))
        except zmq.Again:
            self.counters["send_queue_full"] += 1
            return False
        return True

    def _repeat_and_expire(self) -> None:
        now = time.monotonic()
        for number, pending in list(self._pending.items()):
            if now >= pending.deadline:
                del self._pending[number]
                kind = pending.message.kind  # type: ignore[attr-defined]
                pending.on_failure(PeerSilent(f"{self.endpoint} did not answer {kind} in time"))
            elif now >= pending.next_send:
                pending.next_send = now + pending.retry_s
                if pending.once:
                    pending.message, pending.once = pending.message.model_copy(update=pending.once), _NOTHING
                self.counters["repeats"] += 1
                self._send(pending.message, pending.arrays, pending.asked)


def refusal(reply: ErrorReply) -> Refused:
    """The error that a refusal means to whoever asked."""
    return StaleToken(reply.reason) if reply.code == "stale_token" else Refused(reply.code, reply.reason)


def _log_failure(error: RookeryError) -> None:
    log.warning("request failed", reason=str(error))


class Incoming(NamedTuple):
    """A message with the way back to its sender."""

    peer: bytes
    received: Received

    @property
    def message(self) -> Message:
        return self.received.message

    def check_sender(self, incarnation: str) -> None:
        """Refuses what is said in the name of another process: a service's identity is its incarnation."""
        if self.peer != incarnation.encode():
            raise Refused("wrong_sender", "a service speaks for itself alone")


OnIncoming = Callable[[Any, Incoming], None]


class RequestReceiver:
    """The answering end: dispatches each message to the handler for its kind and answers refusals."""

    def __init__(
        self,
        network: Network,
        endpoint: str,
        handlers: Mapping[str, OnIncoming],
        *,
        name: str,
        send_buffer_bytes: int = 0,  # 0: the system chooses
    ) -> None:
        self.run = ""
        self.counters: Counter[str] = Counter()
        self._handlers = handlers
        self._name = name
        self._loop = network.loop
        self._socket = network.socket(zmq.ROUTER, queue=QUEUE)
        if send_buffer_bytes:
            self._socket.setsockopt(zmq.SNDBUF, send_buffer_bytes)
        # Without these a restarted peer with the same identity is refused, and unroutable answers vanish.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        network.bind(self._socket, endpoint)
        self._watch = ConnectionWatch(self._socket, name, self.counters)
        self._news = self._loop.on_readable(self._socket, self.receive, told=True)
        self._loop.on_readable(self._watch.socket, self._watch.receive, told=True)

    def receive(self) -> None:
        """Takes what has arrived, up to a bound, and dispatches it."""
        for _ in range(MESSAGES_A_TURN):
            frames = receive_frames(self._socket)
            if frames is None:
                break
            self._dispatch(frames[0].bytes, frames[1:])
            if not more_waits(self._socket):
                break
        else:
            return
        self._news.emptied()

    def reply(self, peer: bytes, message: Message, arrays: Arrays | None = None) -> bool:
        """Sends to one peer. False: it is gone or does not read; dropped and counted."""
        frames = encode(message, arrays, self.run)
        self._news.used()
        try:
            send_frames(self._socket, [peer, *frames], arrays)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counters["undeliverable"] += 1
            return False
        return True

    def refuse(self, peer: bytes, message: Message, error: RookeryError) -> None:
        """Answers a request with why it was not carried out."""
        code = error.code if isinstance(error, Refused) else "bad_message"
        number = message.request if isinstance(message, Request) else 0
        self.counters[f"refused.{code}"] += 1
        log.warning("refused", link=self._name, kind=message.kind, code=code, reason=str(error))  # type: ignore[attr-defined]
        self.reply(peer, ErrorReply(request=number, code=code, reason=str(error)[:2_000]))

    def close(self) -> None:
        self._loop.forget(self._watch.socket)
        self._loop.forget(self._socket)
        self._watch.close()
        self._socket.close()

    def _dispatch(self, peer: bytes, frames: list[Any]) -> None:
        try:
            received = decode(frames)
        except BadMessage as error:
            self.counters["bad_messages"] += 1
            log.warning("bad message dropped", link=self._name, reason=str(error))
            self.reply(peer, ErrorReply(code="bad_message", reason=str(error)[:2_000]))
            return
        message = received.message
        try:
            self._handler_for(message)(message, Incoming(peer, received))
        except (Refused, BadMessage) as error:
            self.refuse(peer, message, error)

    def _handler_for(self, message: Message) -> OnIncoming:
        if message.run != self.run and not isinstance(message, Hello):
            raise Refused("other_run", f"this is run {self.run!r}; the message is of run {message.run!r}")
        handler = self._handlers.get(message.kind)  # type: ignore[attr-defined]
        if handler is None:
            raise Refused("unknown_request", f"{self._name} does not answer {message.kind}")  # type: ignore[attr-defined]
        return handler
