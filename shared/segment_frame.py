"""A segment's one frame: a header of fixed size, behind it the arrays as `shared/layout.py` lays them out.

Segments are what a run sends most, so their coding is plain: an actor cuts a segment's rows straight into the
frame that will travel, replay reads the header with one call. The law is the model `Segment`: what its bounds
refuse is refused here at both ends, in its words; only what is beyond doubt is not asked about. The header's
line of text about the arrays follows from the agent's spec and `rows`, so its digest alone travels.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pydantic

from shared.codec import first_problem
from shared.errors import BadMessage
from shared.layout import ALIGNMENT_BYTES, Arrays, Block, Layout, Packed, pack
from shared.messages import Segment

MAGIC = b"segment\x01"  # and the protocol's number
KEPT_STREAMS = 1024  # of which the names were read before; what strangers make up is soon forgotten

# Little endian: who it is of; sequence, produced_steps, actor_index, slot, epoch, round, layout, checksum;
# before, owned, rows; closes_round, and zeros up to a multiple of 64.
RUN_BYTES = 64
_NAMES = struct.Struct(f"<8s{RUN_BYTES}s64s16s")  # magic, run, agent, incarnation; zeros behind text
NUMBERS_AT = _NAMES.size
_NUMBERS = struct.Struct("<8Q3H34s")
_HEADER = struct.Struct(f"<{_NAMES.size}s{_NUMBERS.format.removeprefix('<')}")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES % ALIGNMENT_BYTES == 0

_ENDS = {False: bytes(34), True: b"\x01" + bytes(33)}
_CLOSES = {end: closes for closes, end in _ENDS.items()}
_WORDS, _COUNTS, _TALLIES, _ROWS = 2**64, 2**63, 2**44, 2**16


class SegmentHead(NamedTuple):
    """What the header says: the fields of `Segment`, which its bounds allow, without the price of a model."""

    run: str
    agent: str
    incarnation: str
    sequence: int
    produced_steps: int
    actor_index: int
    slot: int
    epoch: int
    round: int
    layout: int
    checksum: int
    before: int
    owned: int
    rows: int
    closes_round: bool


AnySegment = Segment | SegmentHead
_new = tuple.__new__  # what SegmentHead._make calls, without the call in between


class SegmentFrame(NamedTuple):
    """A segment as it travels, however often."""

    head: SegmentHead
    arrays: Packed
    data: memoryview  # header and arrays


def empty_frame(layout: Layout) -> tuple[Packed, memoryview]:
    """Room for a segment: its arrays, to be filled in, and the frame that they lie in."""
    frame = np.zeros(HEADER_BYTES + layout.nbytes, np.uint8)
    return Packed(layout, frame[HEADER_BYTES:]), frame.data


def frame_of(segment: AnySegment, arrays: Arrays) -> SegmentFrame:
    """A segment whose arrays lie elsewhere, copied: for who has not cut them into a frame."""
    fields = {name: getattr(segment, name) for name in SegmentHead._fields}
    source = pack(arrays)
    packed, data = empty_frame(source.layout)
    packed.block[:] = source.block
    head = SegmentHead(**fields | {"layout": source.layout.digest})
    write_head(head, data)
    return SegmentFrame(head, packed, data)


def write_head(head: SegmentHead, frame: memoryview) -> None:
    """Puts the header before the arrays; BadMessage for what replay would refuse."""
    run, agent, incarnation, *numbers, closes_round = head
    _NAMES.pack_into(frame, 0, *_name_bytes(run, agent, incarnation))
    _check_numbers(head)
    _NUMBERS.pack_into(frame, NUMBERS_AT, *numbers, _ENDS[closes_round])


def read_frame(frame: Any) -> tuple[SegmentHead, Block]:
    """What a frame (any buffer) says and the bytes of its arrays, or BadMessage. Never anything else."""
    if len(frame) < HEADER_BYTES:
        raise BadMessage(f"a frame of {len(frame)} bytes; the header of a segment has {HEADER_BYTES}")
    names, *numbers, end = _HEADER.unpack_from(frame)
    closes_round = _CLOSES.get(end)
    if closes_round is None:
        raise BadMessage(f"a segment's header that ends with {end!r}")
    head = _new(SegmentHead, (*_read_names(names), *numbers, closes_round))
    _check_numbers(head)
    return head, np.frombuffer(frame, np.uint8)[HEADER_BYTES:]


def _check_numbers(head: SegmentHead) -> None:
    """The model is asked only about what is not surely inside its bounds.

    All of those bounds are powers of two or 0, so several numbers are inside them if their union is.
    """
    _, _, _, sequence, produced, index, slot, epoch, number, layout, checksum, before, owned, rows, _ = head
    if not (
        0 <= (sequence | index | slot | epoch | number) < _COUNTS
        and 0 <= produced < _TALLIES
        and 0 <= (layout | checksum) < _WORDS
        and 0 <= (before | owned | rows) < _ROWS
        and sequence
        and owned
        and rows > 1
    ):
        _validate(head)


def _validate(head: SegmentHead) -> None:
    try:
        Segment(**head._asdict())
    except pydantic.ValidationError as error:
        raise BadMessage(f"not a header of protocol 1: {first_problem(error)}") from None


def _check_names(run: str, agent: str, incarnation: str) -> None:
    _validate(SegmentHead(run, agent, incarnation, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, False))


@lru_cache(maxsize=KEPT_STREAMS)
def _name_bytes(run: str, agent: str, incarnation: str) -> tuple[bytes, bytes, bytes, bytes]:
    """Whose a segment is, as it travels; checked once for each stream."""
    _check_names(run, agent, incarnation)
    text = run.encode()
    if len(text) > RUN_BYTES or text.endswith(b"\0"):
        raise BadMessage(f"a run called {run!r}; on the segment link {RUN_BYTES} bytes must be enough")
    return MAGIC, text, agent.encode(), bytes.fromhex(incarnation)


@lru_cache(maxsize=KEPT_STREAMS)
def _read_names(names: bytes) -> tuple[str, str, str]:
    """And back."""
    magic, run, agent, incarnation = _NAMES.unpack(names)
    if magic != MAGIC:
        raise BadMessage(f"a frame that begins with {magic!r}; segments of protocol 1 begin with {MAGIC!r}")
    try:
        read = run.rstrip(b"\0").decode(), agent.rstrip(b"\0").decode(), incarnation.hex()
    except UnicodeDecodeError as error:
        raise BadMessage(f"a segment's names are not text: {error}") from None
    _check_names(*read)
    return read
