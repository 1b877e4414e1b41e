"""Kernels that were compiled when the image was built, laid where numba looks for them.

numba uses a directory only if it can write there, and an image's files cannot be written. Kernels that were
compiled for another kind of processor are compiled anew, and kept there while the container lives.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SHIPPED = Path("/opt/kernels")


def lay_out_kernels(shipped: Path = SHIPPED) -> bool:
    """Before `services.replay.kernels` is imported. False: there are none, or they are there already."""
    wanted = os.environ.get("NUMBA_CACHE_DIR")
    if not wanted or not shipped.is_dir() or Path(wanted).exists():
        return False
    shutil.copytree(shipped, wanted)
    return True
