"""Ctrl-C where there is no loop to take it: noted once, obeyed between two pieces of work; twice, at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupts:
    """While entered, SIGINT and SIGTERM are counted; the second one raises KeyboardInterrupt."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.count = 0
        self._on_first = on_first
        self._before: dict[int, signal.Handlers | int | Callable[[int, FrameType | None], object] | None] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self._on_first()
