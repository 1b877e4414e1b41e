"""A wish to the operating system: let this thread compute for longer at a time, and so be switched less.

More learners than cores take turns every few milliseconds, each time with cold caches. Linux (6.12 and newer)
lets a thread ask for longer turns without taking more of them. Everywhere else, and where it is not allowed,
nothing changes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_S = 0.05
_SYSTEM_CALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr, which Python does not have
_ATTRIBUTES = "IIQiIQQQ"  # size, policy, flags, nice, priority, slice, deadline, period


def ask_for_long_turns(slice_s: float = SLICE_S) -> bool:
    """For the calling thread alone. False: there is no such thing here."""
    number = _SYSTEM_CALL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    size = struct.calcsize(_ATTRIBUTES)
    attributes = struct.pack(_ATTRIBUTES, size, os.SCHED_OTHER, 0, nice, 0, int(slice_s * 1e9), 0, 0)
    answer: int = ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)
    return answer == 0
