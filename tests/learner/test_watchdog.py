from __future__ import annotations

import subprocess
import sys
import time

import pytest

DEADLINE_S = 0.6

BEGIN = f"""
import re, time
from services.learner.watchdog import Watchdog
from shared.loop import Loop
loop = Loop()
watchdog = Watchdog(loop, {DEADLINE_S})
"""

STUCK_IN_C = """
def keeps_the_interpreter_to_itself():
    re.match(r"(a+)+$", "a" * 40 + "b")  # backtracks for hours, in C, with the interpreter's lock held
keeps_the_interpreter_to_itself()
"""
STUCK_IN_PYTHON = """
def never_comes_back():
    while True:
        time.sleep(0.01)
never_comes_back()
"""
TURNING = f"""
end = time.monotonic() + {5 * DEADLINE_S}
while time.monotonic() < end:
    time.sleep({DEADLINE_S / 4})  # an update that takes its time
    loop.turn(block=False)
"""
STOPPED = f"watchdog.stop()\ntime.sleep({3 * DEADLINE_S})\n"


def run(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN + source]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("source", "where"),
    [(STUCK_IN_C, "keeps_the_interpreter_to_itself"), (STUCK_IN_PYTHON, "never_comes_back")],
)
def test_process_that_is_stuck_ends_with_1_and_says_where(source: str, where: str) -> None:
    """Not before the deadline, even inside C code that never lets go; the traceback is on stderr."""
    began = time.monotonic()
    ended = run(source)
    assert time.monotonic() - began >= DEADLINE_S
    assert ended.returncode == 1
    assert ended.stderr.startswith("Timeout (")
    assert f"in {where}" in ended.stderr


@pytest.mark.parametrize("source", [TURNING, STOPPED], ids=["turning", "stopped"])
def test_process_whose_loop_turns_or_that_is_watched_no_more_goes_on(source: str) -> None:
    """Each turn in time winds the clock anew, however long it goes; after `stop` there is none."""
    ended = run(source)
    assert (ended.returncode, ended.stderr) == (0, "")
