from __future__ import annotations

import json
from pathlib import Path

import pytest

from rookery.last_words import TAIL_BYTES, last_words

LIVES = json.dumps({"event": "ready", "level": "info"})
GIVES_UP = json.dumps({"event": "ended by an error", "level": "critical", "reason": "100 updates in a row"})
RAISED = """Traceback (most recent call last):
  File "learner.py", line 3, in loss
    raise KeyError(1)
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "learner.py", line 9, in update
RuntimeError: no loss
"""
STUCK = """Timeout (0:01:05.250000)!
Thread 0x00007fe1375a56c0 (most recent call first):
  File "threading.py", line 982 in run

Thread 0x00007fe1381f8b80 (most recent call first):
  File "mine.py", line 4 in loss
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{LIVES}\n{RAISED}", "RuntimeError: no loss"),
        (f"{LIVES}\n{GIVES_UP}\n", "100 updates in a row"),
        (f"{LIVES}\n{GIVES_UP}\nerror: for the person at the terminal\n", "100 updates in a row"),
        (f"{LIVES}\n{STUCK}", "stuck for 0:01:05; its log says where"),
        (f"{LIVES}\nprog: error: unrecognized arguments: --x\n", "prog: error: unrecognized arguments: --x"),
        (f"{RAISED}{LIVES}\n", ""),
        ("", ""),
        ('{"level": "crit', ""),
    ],
    ids=["raised", "gave up", "gave up in words", "stuck", "usage", "an earlier life's", "nothing", "torn"],
)
def test_last_words_are_what_the_end_of_the_log_says(tmp_path: Path, text: str, words: str) -> None:
    """The last exception, the reason of the last critical event, or that it was stuck."""
    log = tmp_path / "learner-0.log"
    log.write_text(text)
    assert last_words(log) == words


def test_last_words_of_a_long_log_are_found_at_its_end(tmp_path: Path) -> None:
    """Only the tail is read, wherever in a line it begins."""
    log = tmp_path / "learner-0.log"
    log.write_text(f"{LIVES}\n" * (2 * TAIL_BYTES // len(LIVES)) + RAISED)
    assert last_words(log) == "RuntimeError: no loss"


def test_last_words_without_a_log_are_none(tmp_path: Path) -> None:
    """It was never started."""
    assert last_words(tmp_path / "learner-0.log") == ""
