"""Snapshots on the disk: where they lie, how they are proven whole, and how one becomes a buffer again.

`replay/snapshots/<number>/<agent>/` holds the agent's files and a manifest with the size and the crc32 of
each, and of itself. A directory gets its name when everything in it is on the disk, so what has a name is
whole or was damaged later. `rows` holds only the slots that were valid, in the order of their slots; the
other files are as the buffer has them. No sockets, no threads: the command line uses this too.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.replay.records import STATE, Ints
from shared.errors import ConfigError
from shared.logs import get_logger

log = get_logger()

FORMAT = 1
KEEP = 2
BLOCK_BYTES = 2**20
FILES = ("layout.json", "rows", "metadata", "commit", "priorities", "streams", "state")
MANIFEST = "manifest.json"
DRAFT_SUFFIX = ".draft"
RESERVED = "snapshots"  # beside the agents' own directories


class DamagedSnapshotError(Exception):
    """A snapshot that is not what was written; the text says which file and how."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot of one agent says of itself."""

    format: int
    number: int
    agent: str
    steps: int  # that can be drawn from it
    slot_bytes: int  # of `rows` for each valid slot
    slots: int
    sizes: dict[str, int]
    crcs: dict[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())


# --- where ------------------------------------------------------------------------------------------------


def root_of(replay: Path) -> Path:
    """Where a run's replay directory keeps its snapshots."""
    return replay / RESERVED


def numbers(root: Path) -> list[int]:
    """Of all snapshots that have a name, damaged or not, the newest first."""
    found = (path.name for path in root.iterdir()) if root.exists() else ()
    return sorted((int(name) for name in found if name.isdecimal()), reverse=True)


def draft_path(root: Path, number: int, service: int, attempt: int) -> Path:
    """Where one replay service writes its agents until all of them are whole.

    Each attempt has its own: one that was given up is removed by its thread, which may take a while.
    """
    return root / f"{number}.{attempt}.service-{service}{DRAFT_SUFFIX}"


def remove_drafts(root: Path, service: int) -> None:
    """What a service that died had begun."""
    for draft in root.glob(f"*.service-{service}{DRAFT_SUFFIX}"):
        shutil.rmtree(draft)


# --- writing ----------------------------------------------------------------------------------------------


def seal(directory: Path, number: int, agent: str, *, steps: int, slots: int, slot_bytes: int) -> Manifest:
    """Puts the files on the disk, reads them back and writes the manifest: the end of a draft."""
    sizes, crcs = {}, {}
    for name in FILES:
        fsync(directory / name)
        sizes[name], crcs[name] = _measure(directory / name)
    manifest = Manifest(FORMAT, number, agent, steps, slot_bytes, slots, sizes, crcs)
    body = json.dumps(asdict(manifest), sort_keys=True)
    (directory / MANIFEST).write_text(json.dumps({"body": body, "crc32": zlib.crc32(body.encode())}))
    fsync(directory / MANIFEST)
    fsync(directory)
    return manifest


def publish(root: Path, draft: Path, number: int) -> None:
    """Gives a draft's agents their place under the number."""
    target = root / str(number)
    target.mkdir(exist_ok=True)
    for path in sorted(draft.iterdir()):
        path.rename(target / path.name)
    draft.rmdir()
    fsync(target)
    fsync(root)


def prune(root: Path, agents: Iterable[str], keep: int = KEEP) -> None:
    """Removes these agents from all but their newest snapshots; other services' agents are theirs."""
    names = list(agents)
    mine = [number for number in numbers(root) if has(root, number, names)]
    for number in [number for number in numbers(root) if mine[keep:] and number <= mine[keep]]:
        for agent in names:
            shutil.rmtree(root / str(number) / agent, ignore_errors=True)
        if not any((root / str(number)).iterdir()):
            (root / str(number)).rmdir()


def has(root: Path, number: int, agents: Iterable[str]) -> bool:
    """Whether a snapshot names all these agents; not whether they are undamaged."""
    return all((root / str(number) / agent / MANIFEST).exists() for agent in agents)


def fsync(path: Path) -> None:
    """Puts a file or a directory on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _measure(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    block = memoryview(
        bytearray(BLOCK_BYTES)
    )  # one for all: new memory for each block would stall our threads
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return size, crc


# --- proving ----------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> Manifest:
    """The manifest alone; its own checksum is checked, the files' are not."""
    path = directory / MANIFEST
    try:
        outer = json.loads(path.read_bytes())
        body, crc = outer["body"], outer["crc32"]
        if zlib.crc32(body.encode()) != crc:
            raise DamagedSnapshotError(f"{path.name} has crc32 {zlib.crc32(body.encode())}, it says {crc}")
        manifest = Manifest(**json.loads(body))
    except FileNotFoundError:
        raise DamagedSnapshotError(f"{path.name} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedSnapshotError(f"{path.name} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise DamagedSnapshotError(f"{path.name} has format {manifest.format}; this version reads {FORMAT}")
    return manifest


def prove(directory: Path) -> Manifest:
    """The manifest of a snapshot of one agent whose files all are what was written."""
    manifest = read_manifest(directory)
    for name in FILES:
        try:
            size, crc = _measure(directory / name)
        except OSError as error:
            raise DamagedSnapshotError(f"{name} cannot be read: {error.strerror}") from None
        if size != manifest.sizes[name]:
            raise DamagedSnapshotError(f"{name} has {size:,} bytes instead of {manifest.sizes[name]:,}")
        if crc != manifest.crcs[name]:
            raise DamagedSnapshotError(f"{name} has crc32 {crc} instead of {manifest.crcs[name]}")
    return manifest


def prove_all(root: Path, number: int, agents: Iterable[str]) -> dict[str, Manifest]:
    """The manifests of all these agents under one number."""
    proven = {}
    for agent in agents:
        try:
            proven[agent] = prove(root / str(number) / agent)
        except DamagedSnapshotError as error:
            raise DamagedSnapshotError(f"{agent}: {error}") from None
    return proven


def newest_whole(root: Path, agents: Iterable[str]) -> tuple[int, dict[str, Manifest]]:
    """The newest snapshot in which every agent is undamaged; says which newer ones are not, and why."""
    names = list(agents)
    reasons = []
    for number in numbers(root):
        try:
            return number, prove_all(root, number, names)
        except DamagedSnapshotError as error:
            log.warning("snapshot damaged; the one before it is used", number=number, reason=str(error))
            reasons.append(f"{number} ({error})")
    found = f"all are damaged: {'; '.join(reasons)}" if reasons else "none was taken"
    raise ConfigError(f"no snapshot in {root} can be restored: {found}")


# --- coming back ------------------------------------------------------------------------------------------


def restore(source: Path, target: Path, earlier: Iterable[Path] = ()) -> Manifest:
    """Makes of a snapshot the files that `AgentBuffer` opens in `target`, which must be empty.

    `earlier` are buffer directories of the same agent. Openings and tokens only ever rise, so that neither
    the generations of steps nor the rights of learners that came after the snapshot are given out again.
    """
    manifest = prove(source)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; a snapshot is restored into an empty directory")
    for name in FILES:
        if name not in ("rows", "state"):
            shutil.copyfile(source / name, target / name)
    _scatter_rows(source, target / "rows", manifest)
    _write_state(source / "state", target / "state", [path / "state" for path in earlier])
    for name in FILES:
        fsync(target / name)
    fsync(target)
    return manifest


def _scatter_rows(source: Path, path: Path, manifest: Manifest) -> None:
    valid = np.flatnonzero(np.fromfile(source / "commit", "<u8"))
    size = manifest.slot_bytes
    with (source / "rows").open("rb") as rows, path.open("wb") as file:
        file.truncate(manifest.slots * size)
        for first, count in runs(valid):
            file.seek(first * size)
            _copy(rows.read, file.write, count * size)


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], total: int) -> None:
    while total:
        block = read(min(total, BLOCK_BYTES))
        write(block)
        total -= len(block)


def runs(ordered: Ints) -> list[tuple[int, int]]:
    """Rising numbers as (first, count) of those that follow each other without a gap."""
    if not len(ordered):
        return []
    pieces = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return [(int(piece[0]), len(piece)) for piece in pieces]


def _write_state(source: Path, target: Path, earlier: Iterable[Path]) -> None:
    state = _read_state(source)
    for path in earlier:
        other = _read_state(path) if path.exists() else state
        for name in ("openings", "token"):
            state[name] = max(state[name], other[name])
    state.tofile(target)


def _read_state(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    """Zeros where an older version wrote less."""
    return np.frombuffer(path.read_bytes()[: STATE.itemsize].ljust(STATE.itemsize, b"\0"), STATE).copy()


def restore_run(replay: Path, number: int, manifests: dict[str, Manifest]) -> Path | None:
    """Puts a proven snapshot in the place of the present buffers.

    Those are moved into a directory that is returned (None: there were none) and never deleted. The caller
    holds the locks of the run. Everything is copied first: what fails then has changed nothing.
    """
    drafts = {agent: replay / f"{RESERVED}.restored{DRAFT_SUFFIX}" / agent for agent in manifests}
    shutil.rmtree(replay / f"{RESERVED}.restored{DRAFT_SUFFIX}", ignore_errors=True)
    for agent, draft in drafts.items():
        restore(root_of(replay) / str(number) / agent, draft, _buffers_of(replay, agent))
    aside = _fresh_aside(replay)
    for agent, draft in drafts.items():
        present = replay / agent
        if present.exists():
            aside.mkdir(exist_ok=True)
            present.rename(aside / agent)
        draft.rename(present)
    shutil.rmtree(replay / f"{RESERVED}.restored{DRAFT_SUFFIX}")
    fsync(replay)
    return aside if aside.exists() else None


def _buffers_of(replay: Path, agent: str) -> list[Path]:
    """The present buffer and those that earlier restores moved aside."""
    return [replay / agent, *(path / agent for path in replay.glob("before-restore-*"))]


def _fresh_aside(replay: Path) -> Path:
    taken = [int(path.name.rsplit("-", 1)[1]) for path in replay.glob("before-restore-*")]
    return replay / f"before-restore-{max(taken, default=0) + 1}"
