"""The versions of every agent's weights: one line of numbers per agent that never goes back.

Owns `params/agents/<agent>/`: a safetensors file for each kept version, `high_water` (the highest number ever
given, which stands even when files are lost or damaged) and `pins.json`. The newest version is kept in
memory: snapshots and broadcasts read nothing from disk. A damaged file is set aside at open and the version
before it is used. A rollback is `load` of an old version and `publish` of its tensors under a new id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.param_server.atomic_file import agent_directory, remove_leftovers, set_aside, write_atomic
from services.param_server.version_file import (
    DamagedFileError,
    StoredVersion,
    frozen_tensors,
    read_publish_id,
    read_version,
    tensors_checksum,
    to_bytes,
)
from shared.codec import Array
from shared.errors import Refused
from shared.specs import AGENT_ID_PATTERN

SUFFIX = ".safetensors"

log = structlog.get_logger()


@dataclass(slots=True)
class _Line:
    """What is known of one agent's versions without reading a file."""

    folder: Path
    high_water: int = 0
    publish_ids: dict[int, str] = field(default_factory=dict)  # of every kept version, in rising order
    pinned: set[int] = field(default_factory=set)
    newest: StoredVersion | None = None

    def path(self, version: int) -> Path:
        return self.folder / f"{version:08d}{SUFFIX}"


class VersionStore:
    """Keeps the last `keep` versions of each agent, and the pinned ones."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._lines: dict[str, _Line] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
            if re.fullmatch(AGENT_ID_PATTERN, folder.name):  # anything else is not ours
                self._lines[folder.name] = _open_line(folder)

    def publish(
        self, agent: str, tensors: Mapping[str, Array], *, publish_id: str, updates: int, token: int
    ) -> tuple[int, bool]:
        """The version that these tensors are, and whether it is new; a kept publish id is never new."""
        line = self._line(agent)
        for version in reversed(line.publish_ids):
            if line.publish_ids[version] == publish_id:
                return version, False
        own = frozen_tensors(tensors)
        version = line.high_water + 1
        stored = StoredVersion(agent, version, updates, tensors_checksum(own), own, token, publish_id)
        write_atomic(line.path(version), to_bytes(stored))
        _write_high_water(line.folder, version)
        line.high_water, line.newest = version, stored
        line.publish_ids[version] = publish_id
        self._prune(line)
        return version, True

    def load(self, agent: str, version: int | None = None) -> StoredVersion:
        """The newest or the given version, checked in every bit if it has to be read from disk."""
        line = self._lines.get(agent)
        if line is None or line.newest is None:
            raise Refused("unknown_version", f"agent {agent!r} has no version yet")
        if version is None or version == line.newest.version:
            return line.newest
        self._require_kept(agent, version)
        try:
            return read_version(line.path(version), agent, version)
        except (DamagedFileError, OSError) as error:
            log.warning("version_damaged", agent=agent, version=version, reason=str(error))
            raise Refused("version_damaged", f"version {version} of {agent!r} is damaged: {error}") from None

    def newest(self, agent: str) -> StoredVersion | None:
        line = self._lines.get(agent)
        return line.newest if line else None

    def versions(self, agent: str) -> tuple[int, ...]:
        """The numbers that can be loaded, rising."""
        line = self._lines.get(agent)
        return tuple(line.publish_ids) if line else ()

    def pinned(self, agent: str) -> tuple[int, ...]:
        line = self._lines.get(agent)
        return tuple(sorted(line.pinned)) if line else ()

    def agents(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def pin(self, agent: str, version: int) -> None:
        """Keeps a version until it is unpinned."""
        self._require_kept(agent, version)
        line = self._lines[agent]
        _write_pins(line.folder, line.pinned | {version})
        line.pinned.add(version)

    def unpin(self, agent: str, version: int) -> None:
        line = self._lines.get(agent)
        if line is None or version not in line.pinned:
            return
        _write_pins(line.folder, line.pinned - {version})
        line.pinned.discard(version)
        self._prune(line)

    def _line(self, agent: str) -> _Line:
        if agent not in self._lines:
            folder = agent_directory(self._directory, agent)
            folder.mkdir(parents=True, exist_ok=True)
            self._lines[agent] = _Line(folder)
        return self._lines[agent]

    def _require_kept(self, agent: str, version: int) -> None:
        kept = self.versions(agent)
        if version not in kept:
            raise Refused(
                "unknown_version", f"agent {agent!r} has no version {version}; kept are {list(kept)}"
            )

    def _prune(self, line: _Line) -> None:
        for version in list(line.publish_ids)[: -self._keep]:
            if version not in line.pinned:
                line.path(version).unlink(missing_ok=True)
                del line.publish_ids[version]


def _open_line(folder: Path) -> _Line:
    remove_leftovers(folder)
    line = _Line(folder, pinned=_read_pins(folder))
    recorded = _read_high_water(folder)
    # Damaged files count too: their numbers were given to somebody.
    line.high_water = max([recorded, *_numbers(folder, rf"(\d{{8,}}){SUFFIX}.*")])
    if line.high_water != recorded:
        _write_high_water(folder, line.high_water)
    for version in sorted(_numbers(folder, rf"(\d{{8,}}){SUFFIX}")):
        try:
            line.publish_ids[version] = read_publish_id(line.path(version), folder.name, version)
        except DamagedFileError as error:
            _drop_damaged(line, version, error)
    while line.publish_ids and line.newest is None:
        version = max(line.publish_ids)
        try:
            line.newest = read_version(line.path(version), folder.name, version)
        except DamagedFileError as error:
            _drop_damaged(line, version, error)
    return line


def _drop_damaged(line: _Line, version: int, error: DamagedFileError) -> None:
    line.publish_ids.pop(version, None)
    set_aside(line.path(version))
    log.warning(
        "version_damaged",
        agent=line.folder.name,
        version=version,
        reason=str(error),
        consequence="set aside; the version before it is used, its number is not given again",
    )


def _numbers(folder: Path, pattern: str) -> Iterator[int]:
    for path in folder.iterdir():
        if match := re.fullmatch(pattern, path.name):
            yield int(match[1])


def _read_high_water(folder: Path) -> int:
    try:
        return int((folder / "high_water").read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        log.warning(
            "high_water_damaged", agent=folder.name, reason=str(error), consequence="file names count"
        )
        return 0


def _write_high_water(folder: Path, version: int) -> None:
    # The version's own file, flushed before, carries the number through a power cut: no second flush.
    write_atomic(folder / "high_water", f"{version}\n".encode(), durable=False)


def _read_pins(folder: Path) -> set[int]:
    try:
        return {int(version) for version in json.loads((folder / "pins.json").read_bytes())}
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError) as error:
        log.warning("pins_damaged", agent=folder.name, reason=str(error), consequence="nothing is pinned")
        return set()


def _write_pins(folder: Path, pins: set[int]) -> None:
    write_atomic(folder / "pins.json", json.dumps(sorted(pins)).encode())
