from __future__ import annotations

import contextlib
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from services.learner.checkpoint import MOST_CHUNK_BYTES, Uploader, download, pack, unpack
from shared.codec import Received
from shared.errors import BadMessage, PeerSilent, RookeryError, StaleToken
from shared.messages import CheckpointChunk, CheckpointPiece, CheckpointRequest, Done, Token

TOKEN = Token(agent="agent_0", number=3)
TENSORS = {
    "online/w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "adam/w/step": torch.tensor(4.0),
    "rng": torch.arange(5, dtype=torch.uint8),
    "counters": torch.tensor([1, 2, 3]),
    "empty": torch.zeros(0, 3),
}
PACKED = pack(TENSORS, {"next_draw": 2**53 + 1})


def test_packed_checkpoint_comes_back_bit_for_bit() -> None:
    """Every tensor with its type and shape, and the counters, whole."""
    tensors, counters = unpack(PACKED)
    assert counters == {"next_draw": 2**53 + 1}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 50, len(PACKED) // 2, len(PACKED) - 1])
def test_checkpoint_cut_short_is_a_bad_message(length: int) -> None:
    """Half a checkpoint is none."""
    with pytest.raises(BadMessage, match="not a checkpoint"):
        unpack(PACKED[:length])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_bad_message(data: bytes) -> None:
    """Noise is BadMessage, never anything else."""
    with pytest.raises(BadMessage):
        unpack(data)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, len(PACKED) - 1), value=st.integers(0, 255))
def test_checkpoint_with_a_changed_byte_raises_only_bad_message(place: int, value: int) -> None:
    """Whatever byte is wrong, the answer is tensors or BadMessage."""
    data = bytearray(PACKED)
    data[place] = value
    with contextlib.suppress(BadMessage):
        unpack(bytes(data))


@pytest.mark.parametrize(
    "counters", ["[1]", "5", "null", '{"a": 1E999}', '{"a": null}', '{"a": "x"}', '{"a": [1]}', "{"]
)
def test_checkpoint_with_counters_that_are_none_is_a_bad_message(counters: str) -> None:
    """Counters are a mapping from names to whole numbers."""
    with pytest.raises(BadMessage):
        unpack(save(TENSORS, {"counters": counters}))


def test_checkpoint_without_counters_is_a_bad_message() -> None:
    """A safetensors file of somebody else is not a checkpoint."""
    with pytest.raises(BadMessage):
        unpack(save(TENSORS))
    header = json.dumps({"__metadata__": {}}).encode()
    with pytest.raises(BadMessage):
        unpack(struct.pack("<Q", len(header)) + header)


# --- there and back ---------------------------------------------------------------------------------------


class Shelf:
    """Stands for the link to a parameter server that serves these checkpoints, newest last, in pieces."""

    def __init__(self, *stored: bytes, piece_bytes: int = 100, replace_after: int = 1_000) -> None:
        self.stored = list(stored)
        self.piece_bytes, self.replace_after = piece_bytes, replace_after
        self.calls = 0

    def call(self, message: CheckpointRequest, timeout_s: float) -> Received:
        self.calls += 1
        if self.calls > self.replace_after and len(self.stored) > 1:
            self.stored.pop(0)
        data = self.stored[0] if self.stored else b""
        piece = data[message.offset : message.offset + self.piece_bytes]
        answer = CheckpointPiece(
            checkpoint_id=str(zlib.crc32(data)),
            offset=message.offset,
            total_bytes=len(data),
            checksum=self.checksum(data),
        )
        return Received(answer, {"data": np.frombuffer(piece, np.uint8)})

    def checksum(self, data: bytes) -> int:
        return zlib.crc32(data)


def test_download_in_pieces_is_the_whole_checkpoint() -> None:
    """Piece after piece, none left out."""
    shelf = Shelf(PACKED)
    assert download(shelf, TOKEN) == PACKED  # type: ignore[arg-type]
    assert shelf.calls == -(-len(PACKED) // 100)


def test_download_of_nothing_is_none() -> None:
    """An agent that never had a checkpoint starts fresh."""
    assert download(Shelf(), TOKEN) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("replace_after", [1, 2])
def test_download_of_a_checkpoint_that_is_replaced_begins_again(replace_after: int) -> None:
    """Two checkpoints are never mixed, whatever their lengths."""
    newer = pack(TENSORS, {"next_draw": 77, "more": 1})
    assert download(Shelf(PACKED, newer, replace_after=replace_after), TOKEN) == newer  # type: ignore[arg-type]


def test_download_that_does_not_match_its_checksum_is_a_bad_message() -> None:
    """Damage on the way is noticed."""

    class Liar(Shelf):
        def checksum(self, data: bytes) -> int:
            return 1

    with pytest.raises(BadMessage, match="checksum"):
        download(Liar(PACKED), TOKEN)  # type: ignore[arg-type]


class Asked:
    """Stands for the link: keeps each question until the test answers it."""

    def __init__(self) -> None:
        self.questions: list[tuple[CheckpointChunk, bytes, Any, Any]] = []

    def ask(self, message: Any, arrays: Any, *, on_reply: Any, on_failure: Any, timeout_s: float) -> int:
        self.questions.append((message, arrays["data"].tobytes(), on_reply, on_failure))
        return len(self.questions)

    def answer(self) -> None:
        self.questions[-1][2](Received(Done(), {}))

    def fail(self, error: RookeryError) -> None:
        self.questions[-1][3](error)


def test_upload_sends_chunk_after_chunk_until_the_whole_is_there() -> None:
    """The next chunk leaves when the last one is stored; together they are the checkpoint."""
    link, data = Asked(), np.random.default_rng(0).bytes(2 * MOST_CHUNK_BYTES + 5)
    uploader = Uploader(link, TOKEN, 1 << 30)  # type: ignore[arg-type]
    uploader.start(data)
    for sent in (1, 2, 3):
        assert uploader.busy
        assert len(link.questions) == sent
        link.answer()
    assert not uploader.busy
    assert uploader.completed == 1
    assert b"".join(chunk for _message, chunk, _reply, _failure in link.questions) == data
    messages = [message for message, *_rest in link.questions]
    assert [message.offset for message in messages] == [0, MOST_CHUNK_BYTES, 2 * MOST_CHUNK_BYTES]
    assert {message.checkpoint_id for message in messages} == {messages[0].checkpoint_id}
    assert {(message.total_bytes, message.checksum, message.token) for message in messages} == {
        (len(data), zlib.crc32(data), TOKEN)
    }


def test_upload_that_fails_is_given_up_and_the_next_one_is_a_new_one() -> None:
    """A silent parameter server costs one checkpoint, no more."""
    link = Asked()
    uploader = Uploader(link, TOKEN, 1 << 30)  # type: ignore[arg-type]
    uploader.start(b"one")
    link.fail(PeerSilent("nobody"))
    assert not uploader.busy
    assert uploader.refused is None
    uploader.start(b"two")
    link.answer()
    assert uploader.completed == 1
    first, second = (message.checkpoint_id for message, *_rest in link.questions)
    assert first != second


def test_upload_refused_for_a_stale_token_says_so() -> None:
    """A newer learner owns the agent: this one must stop."""
    link = Asked()
    uploader = Uploader(link, TOKEN, 1 << 30)  # type: ignore[arg-type]
    uploader.start(b"one")
    link.fail(StaleToken("a newer learner"))
    assert isinstance(uploader.refused, StaleToken)
