"""Frames to messages and back. Nothing that arrives is executed: a JSON header and raw arrays, that is all.

A message is a header frame and, if it has arrays, one data frame (`shared/layout.py`). Arrays are received as
views on that frame; whoever keeps one copies it once, into the place where it stays. Every check on sizes
happens before anything is allocated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pydantic
import zmq

from shared.errors import BadMessage, SpecMismatch
from shared.layout import Arrays, pack, parse_layout
from shared.messages import ANY_MESSAGE, Message
from shared.specs import AgentSpec

Array = npt.NDArray[Any]
Buffer = bytes | memoryview | zmq.Frame

MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it came in, with its arrays as views on its data frame: for reading only."""

    message: Message
    arrays: dict[str, Array]


def encode(message: Message, arrays: Arrays | None = None, run: str | None = None) -> list[Buffer]:
    """The frames of a message, stamped with its run. Arrays that are `Packed` are not copied."""
    stamp: dict[str, str] = {} if run is None else {"run": run}
    if not arrays:
        return [message.model_copy(update=stamp).model_dump_json().encode()]
    packed = pack(arrays)
    stamp["arrays"] = packed.layout.text
    return [message.model_copy(update=stamp).model_dump_json().encode(), packed.block.data]


def decode(frames: Sequence[zmq.Frame | bytes]) -> Received:
    """The message in these frames, or BadMessage with the reason. Never anything else."""
    if not frames:
        raise BadMessage("a message without frames")
    header = bytes(_buffer(frames[0]))
    if len(header) > MAX_HEADER_BYTES:
        raise BadMessage(f"a header of {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        message = ANY_MESSAGE.validate_json(header)
    except pydantic.ValidationError as error:
        raise BadMessage(f"not a header of protocol 1: {_first_problem(error)}") from None
    expected = 2 if message.arrays else 1
    if len(frames) != expected:
        raise BadMessage(f"{message.kind}: {len(frames)} frames arrived, its header announces {expected}")
    if not message.arrays:
        return Received(message, {})
    layout, data = parse_layout(message.arrays), _buffer(frames[1])
    if data.nbytes != layout.nbytes:
        raise BadMessage(
            f"{message.kind}: {message.arrays[:200]} needs {layout.nbytes} bytes, its frame has {data.nbytes}"
        )
    return Received(message, layout.views(data))


def _buffer(frame: zmq.Frame | bytes) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _first_problem(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the header"
    return f"{where}: {first['msg']}"


def checksum(arrays: Iterable[Array]) -> int:
    """crc32 over the bytes of the arrays, in this order."""
    value = 0
    for array in arrays:
        value = zlib.crc32(_bytes_of(np.ascontiguousarray(array)), value)
    return value


def _bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.data.cast("B") if array.size else memoryview(b"")


def check_segment_arrays(spec: AgentSpec, rows: int, arrays: Arrays) -> None:
    """Refuses arrays that are not exactly the agent's columns with `rows` observations."""
    expected = {column.name for column in spec.columns}
    if set(arrays) != expected:
        raise SpecMismatch(f"arrays {sorted(arrays)} where {sorted(expected)} were expected")
    for column in spec.columns:
        length = rows if column.per == "observation" else rows - 1
        array = arrays[column.name]
        wanted = (length, *column.shape)
        if array.shape != wanted or array.dtype != column.dtype.numpy:
            raise SpecMismatch(
                f"{column.name}: {array.dtype}{list(array.shape)} where "
                f"{column.dtype}{list(wanted)} was expected"
            )
