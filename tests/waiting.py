"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 60.0


def wait_for(
    condition: Callable[[], Value],
    what: str,
    timeout_s: float = PATIENCE_S,
    every_s: float = 0.1,
    explain: Callable[[], str] = str,
) -> Value:
    """The condition's first true value; fails with what was waited for, the last value and an explanation."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {what} (last: {value!r})\n{explain()}".rstrip()
            )
        time.sleep(every_s)
