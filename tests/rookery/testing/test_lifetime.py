"""Stacks end with their process; a removal is not interrupted halfway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rookery.testing import lifetime

ROOT = Path(__file__).parents[3]
BEGINS = """
import os, signal, sys, time
from rookery.testing import lifetime
lifetime.begins("one", lambda: (print("removed one", flush=True), lifetime.ended("one")))
lifetime.begins("two", lambda: (print("removed two", flush=True), lifetime.ended("two")))
"""


def outcome(script: str) -> tuple[int, list[str]]:
    """Exit code and lines of a process that owns two stacks."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINS + script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, sorted(done.stdout.splitlines())


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_signalled_process_removes_its_stacks(number: str) -> None:
    """SIGTERM would otherwise end Python without a word."""
    code, lines = outcome(f"os.kill(os.getpid(), signal.{number}); time.sleep(30)")
    assert code != 0
    assert lines == ["removed one", "removed two"]


def test_failed_removal_does_not_keep_the_others_from_being_removed() -> None:
    """One stack that cannot be removed is bad enough."""
    _, lines = outcome("lifetime.begins('three', lambda: 1 / 0)")
    assert lines == ["removed one", "removed two"]


def test_forked_child_removes_nothing_of_its_parent() -> None:
    """It would take the stacks away in the middle of a test; and SIGTERM ends it as it ends any other."""
    script = """
child = os.fork()
if child == 0:
    sys.exit(0)
print("first child:", os.waitpid(child, 0)[1])
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
print("second child:", os.WTERMSIG(os.waitpid(child, 0)[1]))
print("parent ends", flush=True)
"""
    code, lines = outcome(script)
    assert code == 0
    assert lines == ["first child: 0", "parent ends", "removed one", "removed two", "second child: 15"]


def test_sigterm_is_as_before_when_the_last_stack_is_gone() -> None:
    """Who has no stack any more notices nothing of us."""
    before = signal.getsignal(signal.SIGTERM)
    lifetime.begins("one", lambda: None)
    lifetime.begins("two", lambda: None)
    lifetime.ended("one")
    assert signal.getsignal(signal.SIGTERM) is not before
    lifetime.ended("two")
    assert signal.getsignal(signal.SIGTERM) is before


def test_removal_is_finished_before_an_interrupt_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """And whoever is impatient learns what goes on and how to end it."""
    steps: list[str] = []

    def remove(times: int) -> None:
        with lifetime.uninterrupted("removing one"):
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            steps.append("finished")

    with pytest.raises(KeyboardInterrupt):
        remove(times=1)
    assert steps == ["finished"]
    assert capsys.readouterr().err == "removing one; once more to leave it as it is\n"
    with pytest.raises(KeyboardInterrupt):
        remove(times=2)
    assert steps == ["finished"]


def test_removal_in_another_thread_needs_no_signals() -> None:
    """Only the main thread may set handlers, and only it is interrupted."""
    steps: list[str] = []

    def remove() -> None:
        lifetime.begins("one", lambda: None)
        with lifetime.uninterrupted("removing one"):
            steps.append("finished")
        lifetime.ended("one")

    thread = threading.Thread(target=remove)
    thread.start()
    thread.join()
    assert steps == ["finished"]
