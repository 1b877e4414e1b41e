from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import BadMessage
from shared.messages import Segment
from shared.segment_frame import HEADER_BYTES, MAGIC, SegmentHead, frame_of, read_frame, write_head

INC = "0123456789abcdef" * 2
HEAD = SegmentHead(
    run="a run",
    agent="agent_0",
    incarnation=INC,
    sequence=7,
    produced_steps=64,
    actor_index=1,
    slot=2,
    epoch=3,
    round=4,
    layout=2**64 - 1,
    checksum=2**64 - 1,
    before=4,
    owned=5,
    rows=10,
    closes_round=True,
)
WORDS = ("sequence", "produced_steps", "actor_index", "slot", "epoch", "round", "layout", "checksum")
SHORTS = ("before", "owned", "rows")
NUMBERS = (*WORDS, *SHORTS)


def raw(
    magic: bytes = MAGIC,
    run: bytes = b"a run",
    agent: bytes = b"agent_0",
    incarnation: bytes = bytes.fromhex(INC),
    end: bytes = bytes(34),
    **numbers: int,
) -> bytes:
    """A header as anybody may write one: by docs/protocol.md, not by the code that is tested."""
    values = HEAD._asdict() | numbers
    return struct.pack(
        "<8s64s64s16s8Q3H34s",
        magic,
        run,
        agent,
        incarnation,
        *(values[name] for name in WORDS),
        *(values[name] for name in SHORTS),
        end,
    )


def allowed(**fields: Any) -> bool:
    """What the model says, which is the law."""
    try:
        Segment(**HEAD._asdict() | fields)
    except pydantic.ValidationError:
        return False
    return True


def near(*edges: int, bits: int) -> st.SearchStrategy[int]:
    """Numbers of so many bits, above all those about the bounds."""
    about = [edge + step for edge in (0, *edges, 2**bits) for step in (-2, -1, 0, 1, 2)]
    return st.sampled_from([n for n in about if 0 <= n < 2**bits]) | st.integers(0, 2**bits - 1)


def test_head_has_the_fields_of_the_model() -> None:
    """Whoever adds a field to one must add it to the other."""
    assert set(SegmentHead._fields) == set(Segment.model_fields) - {"kind", "protocol", "arrays"}


def test_header_is_a_whole_number_of_cache_lines() -> None:
    """So that what is aligned in the arrays' layout is aligned in the frame."""
    assert len(raw()) == HEADER_BYTES == 256


@pytest.mark.parametrize("arrays", [{}, {"x": np.arange(5)}, {"x": np.arange(3), "y": np.ones((2, 2))}])
def test_segment_comes_back_as_it_was(arrays: dict[str, np.ndarray]) -> None:
    """The head and the arrays' bytes, from one frame."""
    frame = frame_of(HEAD, arrays)
    head, block = read_frame(memoryview(bytes(frame.data)))
    assert head == frame.head == HEAD._replace(layout=frame.arrays.layout.digest)
    assert (type(head.closes_round), head.closes_round) == (bool, True)
    assert block.tobytes() == frame.arrays.block.tobytes()
    for name, array in arrays.items():
        np.testing.assert_array_equal(frame.arrays[name], array)


def test_header_is_laid_out_as_the_protocol_says() -> None:
    """Byte for byte what docs/protocol.md describes."""
    layout = frame_of(HEAD, {}).arrays.layout.digest
    assert bytes(frame_of(HEAD._replace(closes_round=False), {}).data) == raw(layout=layout)
    assert bytes(frame_of(HEAD, {}).data) == raw(layout=layout, end=b"\x01" + bytes(33))


@settings(max_examples=400, deadline=None)
@given(
    words=st.tuples(*(near(2**44, 2**63, bits=64) for _ in WORDS)),
    shorts=st.tuples(*(near(bits=16) for _ in SHORTS)),
)
@example(words=(1,) * 8, shorts=(0, 1, 2))
def test_numbers_are_taken_if_the_model_takes_them(words: tuple[int, ...], shorts: tuple[int, ...]) -> None:
    """All bounds at once: nothing is let in that the model refuses, and nothing it allows is refused."""
    numbers = dict(zip(NUMBERS, (*words, *shorts), strict=True))
    frame = memoryview(raw(**numbers))
    if allowed(**numbers):
        assert read_frame(frame)[0]._asdict() == HEAD._asdict() | numbers | {"closes_round": False}
    else:
        with pytest.raises(BadMessage, match="not a header of protocol 1"):
            read_frame(frame)


@pytest.mark.parametrize("name", NUMBERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_number_is_taken_if_the_model_takes_it(name: str, data: st.DataObject) -> None:
    """One bound at a time, at both ends of the link, and the refusal names the field."""
    bits = 64 if name in WORDS else 16
    number = data.draw(near(2**44, 2**63, bits=bits) if bits == 64 else near(bits=bits))
    frame, room = memoryview(raw(**{name: number})), memoryview(bytearray(HEADER_BYTES))
    head = HEAD._replace(**{name: number})
    if allowed(**{name: number}):
        assert getattr(read_frame(frame)[0], name) == number
        write_head(head, room)
        return
    with pytest.raises(BadMessage, match=f"not a header of protocol 1: {name}: Input should be"):
        read_frame(frame)
    with pytest.raises(BadMessage, match=f"not a header of protocol 1: {name}: Input should be"):
        write_head(head, room)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"segment\x02"}, "begins with"),
        ({"magic": b"\0" * 8}, "begins with"),
        ({"agent": b""}, "agent: String should match"),
        ({"agent": b".."}, "agent: String should match"),
        ({"agent": b"a/b"}, "agent: String should match"),
        ({"agent": b"a\0b"}, "agent: String should match"),
        ({"agent": b"a\n"}, "agent: String should match"),
        ({"agent": b"\xff"}, "not text"),
        ({"run": b"\xc3"}, "not text"),
        ({"end": b"\x02" + bytes(33)}, "ends with"),
        ({"end": b"\x01" + bytes(32) + b"\x01"}, "ends with"),
        ({"end": bytes(33) + b"\x01"}, "ends with"),
    ],
)
def test_header_with_an_impossible_field_is_a_bad_message(changes: dict[str, bytes], words: str) -> None:
    """Names are held to the model's patterns; what must be zeros is."""
    for _ in range(2):  # what was refused once is not remembered as good
        with pytest.raises(BadMessage, match=words):
            read_frame(memoryview(raw(**changes)))


@pytest.mark.parametrize("length", [0, 1, 8, HEADER_BYTES - 1])
def test_frame_shorter_than_its_header_is_a_bad_message(length: int) -> None:
    """Torn in the middle of the header, or empty."""
    with pytest.raises(BadMessage, match=f"a frame of {length} bytes"):
        read_frame(memoryview(raw()[:length]))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=3 * HEADER_BYTES), known=st.booleans())
def test_random_bytes_raise_only_bad_message(data: bytes, known: bool) -> None:
    """Also such as begin like a segment."""
    frame = MAGIC + data if known else data
    try:
        head, block = read_frame(memoryview(frame))
    except BadMessage:
        return
    assert allowed(**head._asdict())
    assert len(block) == len(frame) - HEADER_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "r" * 65},
        {"run": "ü" * 33},
        {"run": "run\0"},
        {"agent": "a" * 65},
        {"agent": "no/path"},
        {"incarnation": "ab"},
        {"incarnation": INC.upper()},
        {"produced_steps": -1},
        {"checksum": 2**64},
        {"rows": 2**16},
    ],
)
def test_head_that_would_be_refused_is_not_written(changes: dict[str, Any]) -> None:
    """A sender hears of its mistake at once, instead of never: there is nobody on that link to answer."""
    with pytest.raises(BadMessage):
        write_head(HEAD._replace(**changes), memoryview(bytearray(HEADER_BYTES)))
