"""Fakes: a link that keeps what is asked and answers when the test says so, and a clock like that."""

from __future__ import annotations

from typing import Any

from shared.codec import Received
from shared.errors import RookeryError
from shared.messages import Message, Reply, Request


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class FakeLink:
    """Stands where a RequestSender does."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.told: list[Message] = []
        self._callbacks: list[tuple[Any, Any]] = []

    def ask(self, message: Request, *, on_reply: Any, on_failure: Any, timeout_s: float = 10.0) -> int:
        assert timeout_s > 0
        self.asked.append(message)
        self._callbacks.append((on_reply, on_failure))
        return len(self.asked)

    def tell(self, message: Message) -> bool:
        self.told.append(message)
        return True

    @property
    def open(self) -> int:
        return len(self._callbacks)

    def answer(self, reply: Reply) -> None:
        """Answers the oldest open question."""
        self._callbacks.pop(0)[0](Received(reply, {}))

    def fail(self, error: RookeryError) -> None:
        self._callbacks.pop(0)[1](error)
