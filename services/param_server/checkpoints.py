"""Learners' checkpoints: uploaded in chunks, kept whole, read back in pieces.

Owns `checkpoints/<agent>/`: the newest `KEEP` whole checkpoints as `<n>.ckpt` (one JSON line saying what it
is, then the learner's bytes, which nobody here interprets) and at most one unfinished upload under a
temporary name. An upload becomes a checkpoint only when all of it has arrived and its crc32 fits. Uploads do
not survive a restart: the sender is told how much there is and goes back.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.param_server.atomic_file import (
    agent_directory,
    commit,
    remove_leftovers,
    set_aside,
    storage_errors,
    temporary_path,
)
from services.param_server.version_file import DamagedFileError
from shared.errors import Refused

KEEP = 2
MAX_CHECKPOINT_BYTES = 4 << 30
READ_BYTES = 1 << 20
MAX_LABEL_BYTES = 1 << 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Label:
    """What a checkpoint says of itself."""

    checkpoint_id: str
    total_bytes: int
    checksum: int

    def line(self) -> bytes:
        facts = [self.checkpoint_id, self.total_bytes, self.checksum]
        return json.dumps([*facts, zlib.crc32(json.dumps(facts).encode())]).encode() + b"\n"


@dataclass(slots=True)
class _Upload:
    """What has arrived of a checkpoint so far."""

    label: _Label
    path: Path
    received_bytes: int = 0
    crc: int = 0


@dataclass(frozen=True, slots=True)
class _Whole:
    """A finished checkpoint on disk."""

    label: _Label
    path: Path
    number: int


class CheckpointStore:
    """The newest whole checkpoints of every agent, and one upload of each at a time."""

    def __init__(self, directory: Path, max_bytes: int = MAX_CHECKPOINT_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._newest: dict[str, _Whole] = {}
        self._uploads: dict[str, _Upload] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
            remove_leftovers(folder)
            if whole := _newest_whole(folder):
                self._newest[folder.name] = whole

    def add_chunk(  # noqa: PLR0917 - the fields of the message, in its order
        self,
        agent: str,
        checkpoint_id: str,
        offset: int,
        total_bytes: int,
        checksum: int,
        data: bytes | memoryview,
    ) -> tuple[int, bool]:
        """Takes the next bytes in; returns how many there are now and whether the checkpoint is whole.

        A chunk that lies further on is not taken: go on from the number returned.
        """
        label = _Label(checkpoint_id, total_bytes, checksum)
        view = memoryview(data)
        data = view.cast("B") if view.nbytes else memoryview(b"")  # an empty array's view cannot be cast
        self._refuse_impossible(label, offset, len(data))
        newest = self._newest.get(agent)
        if newest is not None and newest.label == label:
            return total_bytes, True
        upload = self._upload(agent, label, offset)
        if upload is None:
            return 0, False
        already = upload.received_bytes - offset
        if 0 <= already < len(data):
            self._append(agent, upload, data[already:])
        if upload.received_bytes < total_bytes:
            return upload.received_bytes, False
        self._finish(agent, upload)
        return total_bytes, True

    def piece(self, agent: str, offset: int, max_bytes: int) -> tuple[str, int, int, bytes] | None:
        """(checkpoint id, total bytes, checksum of the whole, bytes from offset) of the newest whole one.

        An id that changes between two pieces means that a newer one has been finished: begin again.
        """
        whole = self._newest.get(agent)
        if whole is None:
            return None
        label, data = whole.label, b""
        if offset < label.total_bytes:
            try:
                with whole.path.open("rb") as file:
                    file.seek(len(label.line()) + offset)
                    data = file.read(min(max_bytes, label.total_bytes - offset))
            except OSError as error:
                raise Refused("checkpoint_damaged", f"{whole.path.name}: {error.strerror}") from None
        return label.checkpoint_id, label.total_bytes, label.checksum, data

    def _refuse_impossible(self, label: _Label, offset: int, size: int) -> None:
        if not 0 < label.total_bytes <= self._max_bytes:
            raise Refused(
                "checkpoint_too_large",
                f"a checkpoint of {label.total_bytes} bytes; 1 to {self._max_bytes} are accepted",
            )
        if offset < 0 or offset + size > label.total_bytes:
            raise Refused(
                "bad_chunk",
                f"{size} bytes at {offset} do not fit into a checkpoint of {label.total_bytes} bytes",
            )
        if len(label.line()) > MAX_LABEL_BYTES:
            raise Refused(
                "bad_chunk", f"a checkpoint id of {len(label.checkpoint_id)} characters is too long"
            )

    def _upload(self, agent: str, label: _Label, offset: int) -> _Upload | None:
        upload = self._uploads.get(agent)
        if upload is not None and upload.label == label:
            return upload
        # Only a beginning replaces an unfinished upload: a stray later chunk must not throw it away.
        if offset != 0:
            return None
        folder = agent_directory(self._directory, agent)
        path = temporary_path(folder / "upload")
        with storage_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(label.line())
        self._uploads[agent] = _Upload(label, path)
        return self._uploads[agent]

    def _append(self, agent: str, upload: _Upload, data: memoryview) -> None:
        try:
            with storage_errors(upload.path), upload.path.open("ab") as file:
                file.write(data)
        except Refused:
            self._discard(agent)
            raise
        upload.crc = zlib.crc32(data, upload.crc)
        upload.received_bytes += len(data)

    def _finish(self, agent: str, upload: _Upload) -> None:
        label = upload.label
        if upload.crc != label.checksum:
            self._discard(agent)
            raise Refused(
                "checkpoint_damaged",
                f"checkpoint {label.checkpoint_id!r} arrived with checksum {upload.crc} "
                f"where {label.checksum} was announced; send it again from the beginning",
            )
        folder = upload.path.parent
        number = max(_numbers(folder), default=0) + 1
        path = folder / f"{number}.ckpt"
        with storage_errors(path):
            commit(upload.path, path)
        del self._uploads[agent]
        self._newest[agent] = _Whole(label, path, number)
        _prune(folder)

    def _discard(self, agent: str) -> None:
        self._uploads.pop(agent).path.unlink(missing_ok=True)


def _newest_whole(folder: Path) -> _Whole | None:
    for number in sorted(_numbers(folder), reverse=True):
        path = folder / f"{number}.ckpt"
        if not path.exists():  # set aside earlier
            continue
        try:
            return _Whole(_verified(path), path, number)
        except DamagedFileError as error:
            set_aside(path)
            log.warning(
                "checkpoint_damaged",
                agent=folder.name,
                checkpoint=path.name,
                reason=str(error),
                consequence="set aside; the checkpoint before it is used",
            )
    return None


def _verified(path: Path) -> _Label:
    with path.open("rb") as file:
        line = file.readline(MAX_LABEL_BYTES)
        try:
            checkpoint_id, total_bytes, checksum, _ = json.loads(line)
            label = _Label(checkpoint_id, total_bytes, checksum)
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"no readable label: {error}") from None
        if label.line() != line:
            raise DamagedFileError("the label is not as it was written")
        crc, size = 0, 0
        while data := file.read(READ_BYTES):
            crc, size = zlib.crc32(data, crc), size + len(data)
    if (size, crc) != (label.total_bytes, label.checksum):
        raise DamagedFileError(
            f"{size} bytes with checksum {crc} where {label.total_bytes} with {label.checksum} were written"
        )
    return label


def _numbers(folder: Path) -> set[int]:
    names = (re.fullmatch(r"(\d+)\.ckpt.*", path.name) for path in folder.iterdir())
    return {int(name[1]) for name in names if name}


def _prune(folder: Path) -> None:
    own = (path for path in folder.glob("*.ckpt") if path.stem.isdigit())
    whole = sorted(own, key=lambda path: int(path.stem))
    for path in whole[:-KEEP]:
        path.unlink(missing_ok=True)
