"""A wish to the operating system: let whoever computes finish its turn before one of our threads is next.

A service that is woken interrupts, by default, whoever has the core: mostly a learner in the middle of an
update, which then finds its caches cold, as the woken one does. Nothing here is in such a hurry: learners ask
for their batches long before they need them. Linux calls this the batch policy. It takes nothing from a
thread's share of a core. Elsewhere nothing changes.
"""

from __future__ import annotations

import os


def interrupt_nobody() -> bool:
    """For the calling thread and all that it starts from now on. False: there is no such thing here."""
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a sandbox may forbid the call: then it runs as everybody does
        return False
    return True
