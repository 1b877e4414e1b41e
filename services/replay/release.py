"""The function that libzmq calls when it has let go of a batch (`shared/lending.py`).

Compiled, because it is called in libzmq's thread: it takes no lock of the interpreter's.
"""

from __future__ import annotations

import numba
from numba import types

from services.replay.intrinsics import clear_word
from shared.lending import Release, never_free


@numba.cfunc(types.void(types.uintp, types.uintp), cache=True)
def _release(_data: int, word: int) -> None:
    clear_word(word)


never_free(_release)

RELEASE: Release = int(_release.address or 0)
