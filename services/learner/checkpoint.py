"""A learner's checkpoint as bytes (safetensors, so nothing in it can execute) and its way there and back.

Checkpoints live with the parameter server, so that a learner can come back on another host. They travel in
chunks, one at a time, fenced by the learner's token; a newer checkpoint starts only after the last one ended.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib

import numpy as np
import safetensors.torch
from safetensors import SafetensorError

from services.learner.training import Tensors
from shared.codec import Received
from shared.errors import BadMessage, PeerSilent, RookeryError, StaleToken
from shared.links.requests import RequestSender
from shared.logs import get_logger
from shared.messages import CheckpointChunk, CheckpointPiece, CheckpointRequest, Token, expect

log = get_logger()

MOST_CHUNK_BYTES = 4 << 20


def pack(tensors: Tensors, counters: dict[str, int]) -> bytes:
    """A checkpoint as bytes."""
    return safetensors.torch.save(tensors, {"counters": json.dumps(counters)})


def unpack(data: bytes) -> tuple[Tensors, dict[str, int]]:
    """Tensors and counters, or BadMessage."""
    try:
        tensors = safetensors.torch.load(data)
        header_bytes = struct.unpack_from("<Q", data)[0]
        metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
        counters = {str(key): int(value) for key, value in json.loads(metadata["counters"]).items()}
    except (
        SafetensorError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,  # a counter like 1E999 is a number, and infinite
        struct.error,
    ) as error:
        raise BadMessage(f"not a checkpoint: {error}") from None
    return tensors, counters


def download(link: RequestSender, token: Token) -> bytes | None:
    """The newest whole checkpoint of the token's agent, or None; for start-up."""
    parts: list[bytes] = []
    offset, first = 0, None
    while True:
        received = link.call(CheckpointRequest(token=token, offset=offset), timeout_s=30.0)
        piece = expect(received.message, CheckpointPiece)
        if piece.total_bytes == 0:
            return None
        if first is None or piece.checkpoint_id != first.checkpoint_id:
            parts, offset, first = [], 0, piece  # a newer one replaced it meanwhile: begin again
            if piece.offset != 0:
                continue
        parts.append(received.arrays["data"].tobytes())
        if not parts[-1]:
            raise BadMessage("an empty piece of a checkpoint: its file is shorter than it says")
        offset += len(parts[-1])
        if offset >= piece.total_bytes:
            break
    data = b"".join(parts)
    if zlib.crc32(data) != first.checksum:
        raise BadMessage("the checkpoint's bytes do not match its checksum")
    return data


class Uploader:
    """Sends one checkpoint after another, chunk by chunk, without ever blocking the learner."""

    def __init__(self, link: RequestSender, token: Token, max_message_bytes: int) -> None:
        self._link = link
        self._chunk_bytes = min(MOST_CHUNK_BYTES, max_message_bytes)
        self._token = token
        self._data: memoryview | None = None
        self._id = ""
        self._checksum = 0
        self._offset = 0
        self.completed = 0
        self.refused: StaleToken | None = None

    @property
    def busy(self) -> bool:
        return self._data is not None

    def start(self, data: bytes) -> None:
        self._data, self._id = memoryview(data), uuid.uuid4().hex
        self._checksum, self._offset = zlib.crc32(data), 0
        self._send_chunk()

    def _send_chunk(self) -> None:
        assert self._data is not None
        chunk = self._data[self._offset : self._offset + self._chunk_bytes]
        message = CheckpointChunk(
            token=self._token,
            checkpoint_id=self._id,
            offset=self._offset,
            total_bytes=len(self._data),
            checksum=self._checksum,
        )
        arrays = {"data": np.frombuffer(chunk, np.uint8)}
        self._link.ask(message, arrays, on_reply=self._on_stored, on_failure=self._on_failure, timeout_s=30.0)

    def _on_stored(self, _received: Received) -> None:
        assert self._data is not None
        self._offset += self._chunk_bytes
        if self._offset < len(self._data):
            self._send_chunk()
        else:
            self._data = None
            self.completed += 1

    def _on_failure(self, error: RookeryError) -> None:
        self._data = None
        if isinstance(error, StaleToken):
            self.refused = error
        level = log.warning if isinstance(error, PeerSilent) else log.error
        level("checkpoint not stored; the next one is tried as usual", reason=str(error))
