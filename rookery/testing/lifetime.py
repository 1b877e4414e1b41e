"""Stacks end with the process that made them, however it ends: at exit, at Ctrl-C, at SIGTERM.

(Against `kill -9` nothing helps but the next start, see `removal.sweep`.)
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from rookery.interrupts import Interrupts

_removals: dict[str, Callable[[], None]] = {}  # of the projects that exist now


def begins(project: str, remove: Callable[[], None]) -> None:
    """From now on the project is removed when this process ends."""
    _removals[project] = remove
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def ended(project: str) -> None:
    """The project is gone."""
    _removals.pop(project, None)
    if not _removals and _is_main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted(what: str) -> Iterator[None]:
    """Lets a removal finish: one Ctrl-C or SIGTERM in the middle is obeyed afterwards, a second at once."""
    if not _is_main_thread():  # signals never interrupt other threads
        yield
        return
    with Interrupts(lambda: print(f"{what}; once more to leave it as it is", file=sys.stderr)) as interrupts:
        yield
    if interrupts.count:
        raise KeyboardInterrupt


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    """Like Ctrl-C: pytest then ends its fixtures, and scripts leave their `with` blocks."""
    raise KeyboardInterrupt("SIGTERM")


@atexit.register
def _remove_all() -> None:
    with ExitStack() as one_after_the_other:  # each, also after one that fails
        for remove in list(_removals.values()):
            one_after_the_other.callback(remove)


def _forget_in_child() -> None:
    """A forked child does not own its parent's stacks."""
    _removals.clear()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
