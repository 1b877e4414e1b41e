"""Frames to messages and back. Nothing here executes anything that arrives: JSON headers and raw arrays only.

Arrays are sent from where they lie and received as views on the frame; whoever keeps one copies it once,
into the place where it stays. Every check on sizes happens before anything is allocated.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pydantic
import zmq

from shared.errors import BadMessage, SpecMismatch
from shared.messages import ANY_MESSAGE, ArrayHeader, Message
from shared.specs import AgentSpec, dtype_of

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Buffer = bytes | memoryview | zmq.Frame

MAX_HEADER_BYTES = 1 << 20
MAX_ARRAY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it came in, with its arrays as views on the frames: for reading only."""

    message: Message
    arrays: dict[str, Array]


def encode(message: Message, arrays: Arrays | None = None) -> list[Buffer]:
    """The frames of a message: the header, then each array's bytes without a copy where it is contiguous."""
    if not arrays:
        return [message.model_dump_json().encode()]
    solid = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    headers = _array_headers(tuple((name, array.dtype, array.shape) for name, array in solid.items()))
    frames: list[Buffer] = [message.model_copy(update={"arrays": headers}).model_dump_json().encode()]
    frames.extend(_bytes_of(array) for array in solid.values())
    return frames


@lru_cache(maxsize=1024)
def _array_headers(layout: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> tuple[ArrayHeader, ...]:
    """The same few layouts are sent over and over, and building headers takes longer than drawing a batch."""
    return tuple(ArrayHeader(name=name, dtype=dtype_of(dtype), shape=shape) for name, dtype, shape in layout)


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
    if len(frames) - 1 != len(message.arrays):
        raise BadMessage(f"{message.kind}: {len(message.arrays)} arrays announced, {len(frames) - 1} arrived")
    arrays: dict[str, Array] = {}
    for array_header, frame in zip(message.arrays, frames[1:], strict=True):
        if array_header.name in arrays:
            raise BadMessage(f"{message.kind}: array {array_header.name!r} twice")
        arrays[array_header.name] = _view(message.kind, array_header, _buffer(frame))
    return Received(message, arrays)


def _buffer(frame: zmq.Frame | bytes) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _view(kind: str, header: ArrayHeader, buffer: memoryview) -> Array:
    dtype = header.dtype.numpy
    expected = math.prod(header.shape) * dtype.itemsize
    # Sides are bounded as if none were 0: numpy refuses an empty array with impossible sides in its own way.
    if math.prod(max(1, side) for side in header.shape) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise BadMessage(
            f"{kind}: array {header.name!r} {header.dtype}{list(header.shape)}; "
            f"the limit is {MAX_ARRAY_BYTES} bytes"
        )
    if buffer.nbytes != expected:
        raise BadMessage(
            f"{kind}: array {header.name!r} {header.dtype}{list(header.shape)} needs {expected} bytes, "
            f"its frame has {buffer.nbytes}"
        )
    return np.frombuffer(buffer, dtype).reshape(header.shape)


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
