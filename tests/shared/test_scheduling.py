from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

import pytest

from shared import scheduling
from shared.scheduling import interrupt_nobody

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this policy")


def in_a_thread(call: object) -> list[object]:
    """What it returns there: the policy of the tests' own thread stays."""
    assert callable(call)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found


@on_linux
def test_thread_that_interrupts_nobody_keeps_its_share_and_so_do_those_it_starts() -> None:
    """Its policy changes and is inherited, its niceness does not."""

    def ask() -> tuple[bool, int, list[object], int]:
        done = interrupt_nobody()
        policies = in_a_thread(lambda: os.sched_getscheduler(0))
        return done, os.sched_getscheduler(0), policies, os.getpriority(os.PRIO_PROCESS, 0)

    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert in_a_thread(ask) == [(True, os.SCHED_BATCH, [os.SCHED_BATCH], nice)]


@on_linux
def test_system_that_forbids_it_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may refuse the call; the service runs all the same."""

    def refuse(*_arguments: object) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(scheduling.os, "sched_setscheduler", refuse)
    assert in_a_thread(interrupt_nobody) == [False]


def test_system_without_the_policy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked for that does not exist."""
    monkeypatch.delattr(scheduling.os, "SCHED_BATCH", raising=False)
    assert interrupt_nobody() is False
