"""Ends a learner that is stuck, even inside C code that keeps the interpreter to itself.

A timer of the loop winds a clock; when nobody has wound it for too long, a thread that needs nothing of the
interpreter writes the tracebacks of all threads to the log and ends the process with code 1. Whoever started
it starts it again, from its checkpoint. Start-up is not watched: it may wait for others as long as it takes.

While the machine sleeps the clock stands still. A process that is stopped (SIGSTOP) for longer than the
deadline is ended when it wakes up: its lease lapsed long before.
"""

from __future__ import annotations

import faulthandler

from shared.loop import Loop

MOST_PERIOD_S = 5.0


class Watchdog:
    """Watches the thread of this loop from now until `stop`. One in a process: the clock is the process's."""

    def __init__(self, loop: Loop, deadline_s: float) -> None:
        period_s = min(MOST_PERIOD_S, deadline_s / 4)
        # What begins just before the clock would have been wound has the whole deadline all the same.
        self._patience_s = deadline_s + period_s
        self._timer = loop.every(period_s, self._wind)
        self._wind()

    def _wind(self) -> None:
        faulthandler.dump_traceback_later(self._patience_s, exit=True)

    def stop(self) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
