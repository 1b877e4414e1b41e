"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 60.0


def wait_for(
    condition: Callable[[], Value], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.1
) -> Value:
    """The condition's first true value; fails with `what` and the last value when time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what} (last: {value!r})")
        time.sleep(every_s)
