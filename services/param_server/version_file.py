"""One version of an agent's weights, and how it looks as a safetensors file.

The file's metadata says which version it is, who published it and the checksum of its tensors; `seal` is a
crc32 over that metadata and over the names, types and shapes, so that a flipped bit is found wherever it is.
Nothing in a file is executed; a file that does not check out is `DamagedFileError`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from shared.codec import Array, checksum
from shared.errors import Refused, RookeryError
from shared.specs import DType

MAX_HEADER_BYTES = 1 << 24


class DamagedFileError(RookeryError):
    """A file that is not what was written. Use the version before it."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredVersion:
    """An immutable version of an agent's weights: the tensors are read-only and sorted by name."""

    agent: str
    version: int
    updates: int
    checksum: int
    tensors: dict[str, Array]
    token: int
    publish_id: str


def frozen_tensors(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Read-only copies, sorted by name; this is the one copy of what arrived in frames."""
    if not tensors:
        raise Refused("bad_weights", "a state dict without tensors cannot become a version")
    return {name: _frozen(name, tensors[name]) for name in sorted(tensors)}


def tensors_checksum(tensors: Mapping[str, Array]) -> int:
    """crc32 over the tensors in the order of their names."""
    return checksum(tensors[name] for name in sorted(tensors))


def to_bytes(stored: StoredVersion) -> bytes:
    """The version as the contents of a safetensors file."""
    facts = {
        "agent": stored.agent,
        "version": str(stored.version),
        "publish_id": stored.publish_id,
        "updates": str(stored.updates),
        "token": str(stored.token),
        "checksum": str(stored.checksum),
    }
    layout = {name: [array.dtype.name, list(array.shape)] for name, array in stored.tensors.items()}
    return save_tensors(stored.tensors, metadata={**facts, "seal": str(_seal(facts, layout))})


def read_publish_id(path: Path, agent: str, version: int) -> str:
    """The publish id in a version's header, without reading its tensors."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
    return _facts(start + header, agent, version)["publish_id"]


def read_version(path: Path, agent: str, version: int) -> StoredVersion:
    """The whole version, checked in every bit, or DamagedFileError."""
    data = path.read_bytes()
    facts = _facts(data, agent, version)
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFileError(f"{path.name} is not a safetensors file: {error}") from None
    seal = facts.pop("seal", "")
    layout = {name: [tensors[name].dtype.name, list(tensors[name].shape)] for name in sorted(tensors)}
    if seal != str(_seal(facts, layout)):
        raise DamagedFileError(f"{path.name}: the header does not match its seal {seal}")
    actual = tensors_checksum(tensors)
    if facts["checksum"] != str(actual):
        raise DamagedFileError(f"{path.name}: checksum {actual} where {facts['checksum']} was written")
    return StoredVersion(
        agent=agent,
        version=version,
        updates=int(facts["updates"]),
        checksum=actual,
        tensors=frozen_tensors(tensors),
        token=int(facts["token"]),
        publish_id=facts["publish_id"],
    )


def _facts(data: bytes, agent: str, version: int) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    try:
        facts = json.loads(data[8 : 8 + length])["__metadata__"]
        if (facts["agent"], facts["version"]) != (agent, str(version)):
            raise DamagedFileError(f"version {version} of {agent} says that it is another: {facts}")
        return {str(key): str(facts[key]) for key in facts} | {"publish_id": str(facts["publish_id"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"version {version} of {agent} has no readable header: {error}") from None


def _seal(facts: Mapping[str, str], layout: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps([facts, layout], sort_keys=True).encode())


def _frozen(name: str, array: Array) -> Array:
    known = {dtype.numpy for dtype in DType}
    if array.dtype not in known or name == "__metadata__":
        raise Refused("bad_weights", f"tensor {name!r} of type {array.dtype} cannot be stored")
    copy = np.array(array, order="C", copy=True)
    copy.flags.writeable = False
    return copy
