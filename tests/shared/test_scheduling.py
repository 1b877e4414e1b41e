from __future__ import annotations

import os
import platform
import sys
import threading

import pytest

from shared.scheduling import ask_for_long_turns

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such turns")


@on_linux
def test_wish_for_long_turns_changes_neither_policy_nor_niceness() -> None:
    """It asks for longer turns, not for more of them."""
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(ask_for_long_turns()))
    thread.start()
    thread.join()
    assert found == [True]
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


def test_machine_that_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No system call is made whose number could mean something else there."""
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert ask_for_long_turns() is False
