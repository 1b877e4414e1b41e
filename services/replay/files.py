"""Files that are mapped into memory, so that what was written outlives `kill -9`.

Beside them lies `layout.json`, which says how they are laid out; files that were made for another layout are
refused.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError
from shared.specs import AgentSpec


def map_array(
    path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, huge_pages: bool = False
) -> npt.NDArray[Any]:
    """The file as an array, made (zeros) or extended to the size it needs.

    The space is claimed now: a write into a mapped file on a full disk would kill the process later.
    """
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, size)
        _claim_space(path, handle, size)
        mapped = mmap.mmap(handle, size)
        if huge_pages:
            _ask_for_huge_pages(mapped)
        return np.ndarray(shape, dtype, buffer=mapped)
    finally:
        os.close(handle)


def _ask_for_huge_pages(mapped: mmap.mmap) -> None:
    """Rows are drawn from all over a file of gigabytes: with pages of 2 MiB, where the kernel has them for
    files, the processor finds nearly every row's page at once. Without them it is only slower."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            mapped.madvise(mmap.MADV_HUGEPAGE)


def _claim_space(path: Path, handle: int, size: int) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        raise ConfigError(
            f"no room for {size:,} bytes in {path}: {error.strerror}; "
            "free some, or lower replay.capacity_steps"
        ) from None


def sync_file(path: Path) -> None:
    """Puts a file's mapped pages on the disk; from any thread, since it only needs the path."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)


def check_layout(path: Path, spec: AgentSpec, slots: int, segment_steps: int, n_step: int) -> None:
    """Writes down how the files beside it are laid out, or refuses those of another layout."""
    wanted = {
        "format": 4,
        "spec": spec.model_dump(mode="json"),
        "slots": slots,
        "segment_steps": segment_steps,
        "n_step": n_step,
    }
    if empty := [column.name for column in spec.columns if column.row_items == 0]:
        raise ConfigError(f"{empty[0]} has a shape without any values; nothing of it could be stored")
    if not path.exists():
        _write_layout(path, json.dumps(wanted, indent=1))
        return
    found = _read_layout(path)
    differences = [
        f"{key} is {found.get(key)} there and {value} here"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if differences:
        raise ConfigError(
            f"the replay files in {path.parent} were made for another config: {'; '.join(differences)}. "
            "Set it back, or start a new run directory"
        )


def _read_layout(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} is damaged, so the files beside it cannot be read; start a new run directory"
        )
    return found


def _write_layout(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    sync_file(draft)
    draft.replace(path)
    sync_file(path.parent)
