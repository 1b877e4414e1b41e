"""What the ring's files consist of: a slot's metadata, its place in memory, an agent's numbers, a row."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.replay.files import map_array
from shared.specs import AgentSpec

WORD_BYTES = 8

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

METADATA = np.dtype(
    [
        ("incarnation", "<u8", (2,)),
        ("sequence", "<u8"),
        ("generation", "<u8"),
        ("stored_after", "<u8"),  # steps of this stream that are stored once this segment is
        ("produced_after", "<u8"),  # what its actor said it had produced by then
        ("actor_index", "<u8"),
        ("env_slot", "<u8"),
        ("epoch", "<u8"),
        ("before", "<u4"),
        ("owned", "<u4"),
        ("rows", "<u4"),
        ("unused", "<u4"),
        ("checksum", "<u8"),
    ]
)
METADATA_STRUCT = struct.Struct("<9Q4IQ")  # the same, for writing one at once
assert METADATA_STRUCT.size == METADATA.itemsize
# What drawing needs of a slot, four slots to a cache line; in memory only, generation 0 where it is invalid.
PLACE = np.dtype(
    [("generation", "<u8"), ("before", "<u2"), ("owned", "<u2"), ("rows", "<u2"), ("unused", "<u2")]
)
STATE = np.dtype(
    [
        ("openings", "<u8"),
        ("max_priority", "<f8"),
        ("sampled_steps", "<u8"),
        ("token", "<u8"),
        ("duplicates_dropped", "<u8"),
        ("gaps_dropped", "<u8"),
        ("stale_priorities", "<u8"),
        ("damaged_slots", "<u8"),
        ("limiter_offset", "<f8"),
        ("samples_per_insert", "<f8"),
        ("min_steps", "<u8"),
        # What the config said when the two above were last set: while it says the same, they stay.
        ("config_samples_per_insert", "<f8"),
        ("config_min_steps", "<u8"),
    ]
)


class State:
    """The few numbers of an agent that must outlive the process, each updated in place with one store."""

    def __init__(self, path: Path) -> None:
        self._record = map_array(path, STATE, (1,))
        # Views of bytes, not arrays: they give and take plain numbers in a quarter of the time.
        self._fields: dict[str, Any] = {name: self._record[name].data for name in STATE.names or ()}

    def __getitem__(self, name: str) -> Any:
        return self._fields[name][0]

    def __setitem__(self, name: str, value: float) -> None:
        self._fields[name][0] = value

    def as_bytes(self) -> bytes:
        """As the file has them now."""
        return self._record.tobytes()


def row_dtype(spec: AgentSpec) -> np.dtype[Any]:
    """One row with all its columns: the observation first, then the steps' from wide to narrow, no gaps but
    at the end, where it is filled up to whole 8-byte words."""
    observation, steps = spec.observation_columns, spec.step_columns
    ordered = [*observation, *sorted(steps, key=lambda column: -column.dtype.numpy.itemsize)]
    offsets, at = [], 0
    for column in ordered:
        at = -(-at // column.dtype.numpy.itemsize) * column.dtype.numpy.itemsize
        offsets.append(at)
        at += column.row_bytes
    return np.dtype(
        {
            "names": [column.name for column in ordered],
            "formats": [(column.dtype.numpy, column.shape) for column in ordered],
            "offsets": offsets,
            "itemsize": -(-at // WORD_BYTES) * WORD_BYTES,
        }
    )


@lru_cache(maxsize=1024)
def incarnation_words(incarnation: str) -> tuple[int, int]:
    """The 32 hex digits as the two numbers that are stored."""
    return int(incarnation[:16], 16), int(incarnation[16:], 16)


def incarnation_text(words: Array) -> str:
    """And back."""
    return f"{int(words[0]):016x}{int(words[1]):016x}"
