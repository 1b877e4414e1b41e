"""How the arrays of a message lie in its data frame: one after another, each at a multiple of 64 bytes.

A header names them in one line, `observation float32[512,1,128];action int64[512]`: the same few lines are
sent over and over, so each is parsed once. Arrays that are made for sending are made in one block (`Packed`)
and sent from where they lie; others are copied together once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shared.errors import BadMessage
from shared.lending import Loan
from shared.specs import DType, dtype_of

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Block = npt.NDArray[np.uint8]
Described = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

ALIGNMENT_BYTES = 64
MAX_ARRAYS = 512
MAX_BYTES = 1 << 30  # of all arrays of a message
KEPT_LAYOUTS = 256  # a run has a few dozen; what strangers make up is soon forgotten

_ONE_ARRAY = re.compile(r"([A-Za-z0-9_./-]{1,128}) ([a-z0-9]{1,8})\[((?:[0-9]{1,13},){0,7}[0-9]{1,13})?\]")


@dataclass(frozen=True, slots=True)
class Place:
    """One array in the block."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All arrays of a message."""

    text: str
    places: dict[str, Place]
    offsets: npt.NDArray[np.int64]
    nbytes: int
    digest: int  # xxh3 of the text: what a segment carries in its place


class Packed(Mapping[str, Array]):
    """Arrays that lie in one block as they travel. Views on it are made when they are asked for.

    `loan` is for blocks that are sent again and again, with other contents each time.
    """

    __slots__ = ("_views", "block", "layout", "loan")

    def __init__(self, layout: Layout, block: Block, loan: Loan | None = None) -> None:
        self.layout, self.block, self.loan = layout, block, loan
        self._views: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        view = self._views.get(name)
        if view is None:
            place = self.layout.places[name]
            view = self._views[name] = np.ndarray(place.shape, place.dtype, self.block, place.offset)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)

    def __repr__(self) -> str:
        return f"Packed({self.layout.text})"


def pack(arrays: Arrays) -> Packed:
    """The arrays in one block: themselves if they are, a copy if not."""
    if isinstance(arrays, Packed):
        return arrays
    layout = layout_of(tuple((name, array.dtype, array.shape) for name, array in arrays.items()))
    packed = Packed(layout, np.zeros(layout.nbytes, np.uint8))
    for name, array in arrays.items():
        packed[name][...] = array
    return packed


@lru_cache(maxsize=KEPT_LAYOUTS)
def layout_of(arrays: Described) -> Layout:
    """The layout of arrays that are to be sent; ValueError for what does not travel."""
    parts = [
        f"{name} {dtype_of(dtype)}[{','.join(str(side) for side in shape)}]" for name, dtype, shape in arrays
    ]
    try:
        return parse_layout(";".join(parts))
    except BadMessage as error:
        raise ValueError(str(error)) from None


@lru_cache(maxsize=KEPT_LAYOUTS)
def parse_layout(text: str) -> Layout:
    """The layout that a header announces, or BadMessage. Nothing is allocated for it yet."""
    places: list[Place] = []
    end = 0
    for part in text.split(";", MAX_ARRAYS) if text else ():
        place = _parse_place(part, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        places.append(place)
        end = place.offset + place.nbytes
    if end > MAX_BYTES:
        raise BadMessage(f"arrays of {end} bytes; the limit is {MAX_BYTES}")
    named = {place.name: place for place in places}
    if len(named) != len(places):
        raise BadMessage(f"an array's name twice in {text[:200]!r}")
    offsets = np.array([place.offset for place in places], np.int64)
    return Layout(text, named, offsets, end, xxhash.xxh3_64_intdigest(text.encode()))


def _parse_place(part: str, offset: int) -> Place:
    found = _ONE_ARRAY.fullmatch(part)
    if found is None:
        raise BadMessage(f"not the description of an array: {part[:200]!r}")
    name, dtype, sides = found.groups()
    try:
        numpy = DType(dtype).numpy
    except ValueError:
        raise BadMessage(f"array {name!r} of {dtype}; possible are {', '.join(DType)}") from None
    shape = tuple(int(side) for side in sides.split(",")) if sides else ()
    # Sides are bounded as if none were 0: numpy refuses an empty array with impossible sides in its own way.
    if math.prod(max(1, side) for side in shape) * numpy.itemsize > MAX_BYTES:
        raise BadMessage(f"array {part[:200]!r}; the limit is {MAX_BYTES} bytes")
    return Place(name, numpy, shape, offset, math.prod(shape) * numpy.itemsize)
