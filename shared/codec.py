"""Frames to messages and back. Nothing that arrives is executed: a JSON header and raw arrays, that is all.

A message is a header frame and, if it has arrays, one data frame (`shared/layout.py`). Arrays are received as
views on that frame; whoever keeps one copies it once, into the place where it stays. Every check on sizes
happens before anything is allocated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic
import xxhash
import zmq
from pydantic_core import to_json

from shared.errors import BadMessage, SpecMismatch
from shared.layout import KEPT_LAYOUTS, Arrays, Layout, Packed, layout_of, pack, parse_layout
from shared.messages import ANY_MESSAGE, Message
from shared.specs import AgentSpec

Array = npt.NDArray[Any]
Buffer = bytes | memoryview | zmq.Frame

MAX_HEADER_BYTES = 1 << 20

_validate_json = ANY_MESSAGE.validator.validate_json


class Received(NamedTuple):
    """A message as it came in, with its arrays as views on its data frame: for reading only."""

    message: Message
    arrays: Arrays


def encode(
    message: Message,
    arrays: Arrays | None = None,
    run: str | None = None,
    asked: tuple[int, float] | None = None,
) -> list[Buffer]:
    """The frames of a message, stamped with its run. Arrays that are `Packed` are not copied.

    `asked` stamps a request too, with its number and its deadline in seconds.
    """
    run = message.run if run is None else run
    if not arrays:
        return [_header(message, run, "", asked)]
    packed = pack(arrays)
    return [_header(message, run, packed.layout.text, asked), packed.block.data]


# How a header begins that nobody has stamped yet: the fields of Message come first, then those of Request.
_UNSTAMPED = b'{"protocol":1,"run":"","arrays":"",'
_UNASKED = _UNSTAMPED + b'"request":0,"deadline_s":10.0,'


def _header(message: Message, run: str, arrays: str, asked: tuple[int, float] | None) -> bytes:
    """A stamp takes the empty one's place: copying the message for it takes twice as long as all this."""
    header = to_json(message)
    if asked is None:
        if header.startswith(_UNSTAMPED):
            return _stamp(run, arrays) + header[len(_UNSTAMPED) :]
        if message.run == run and message.arrays == arrays:
            return header
        return to_json(message.model_copy(update={"run": run, "arrays": arrays}))
    number, deadline_s = asked
    if header.startswith(_UNASKED):
        asking = b'"request":%d,"deadline_s":%a,' % (number, deadline_s)
        return _stamp(run, arrays) + asking + header[len(_UNASKED) :]
    update = {"run": run, "arrays": arrays, "request": number, "deadline_s": deadline_s}
    return to_json(message.model_copy(update=update))


@lru_cache(maxsize=KEPT_LAYOUTS)
def _stamp(run: str, arrays: str) -> bytes:
    return to_json({"protocol": 1, "run": run, "arrays": arrays})[:-1] + b","


def decode(frames: Sequence[zmq.Frame | bytes]) -> Received:
    """The message in these frames, or BadMessage with the reason. Never anything else."""
    if not frames:
        raise BadMessage("a message without frames")
    header = frames[0].bytes if isinstance(frames[0], zmq.Frame) else frames[0]
    if len(header) > MAX_HEADER_BYTES:
        raise BadMessage(f"a header of {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        message = _validate_json(header)
    except pydantic.ValidationError as error:
        raise BadMessage(f"not a header of protocol 1: {first_problem(error)}") from None
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
    return Received(message, Packed(layout, np.frombuffer(data, np.uint8)))


def _buffer(frame: zmq.Frame | bytes) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def first_problem(error: pydantic.ValidationError) -> str:
    """Which field it is and what is wrong with it."""
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


def pack_segment(spec: AgentSpec, arrays: Arrays) -> Packed:
    """A segment's arrays as they travel: in the order of the agent's columns."""
    if isinstance(arrays, Packed):
        return arrays
    names = [column.name for column in spec.columns]
    if set(arrays) != set(names):
        raise SpecMismatch(f"arrays {sorted(arrays)} where {sorted(names)} were expected")
    return pack({name: arrays[name] for name in names})


def segment_checksum(packed: Packed) -> int:
    """xxh3 over the data frame of a segment, gaps included: a sixteenth of the time that crc32 takes."""
    return xxhash.xxh3_64_intdigest(packed.block)  # type: ignore[arg-type]  # an array is a buffer


def segment_layout(spec: AgentSpec, rows: int) -> Layout:
    """What the data frame of a segment with `rows` observations must be."""
    return layout_of(
        tuple(
            (column.name, column.dtype.numpy, (rows - (column.per == "step"), *column.shape))
            for column in spec.columns
        )
    )
