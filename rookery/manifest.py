"""One consistent checkpoint of a whole run in rounds: learners, versions, replay and actors at one boundary.

A run in lockstep or sequential mode that stops between two rounds leaves files that fit together; the
manifest names them all with their checksums, and a resume first proves them. Copies of them (`keep`) are what
a run goes back to when something died in the middle of a round: played again, it comes to the same weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from rookery.run_directory import RunDirectory, read_progress
from services.replay.rounds import AT_REST, read_rounds
from shared.config import Config
from shared.errors import ConfigError

PARTS = ("params", "checkpoints", "replay")
READ_BYTES = 1 << 24


def write_manifest(run: RunDirectory, config: Config) -> dict[str, Any]:
    """Describes the run as it lies there, stopped between two rounds."""
    manifest = _describe(run, config)
    rounds = {agent: part["rounds"] for agent, part in manifest["agents"].items()}
    if len(set(rounds.values())) > 1:
        raise ConfigError(f"{run.path} was not stopped between two rounds: {rounds}")
    temporary = run.manifest_path.with_suffix(".tmp")
    temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    temporary.replace(run.manifest_path)
    return manifest


def check_manifest(run: RunDirectory, config: Config) -> None:
    """Proves that everything is still as it was when the run stopped, or says what is not."""
    try:
        expected = json.loads(run.manifest_path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run.manifest_path} cannot be read ({error}); begin the run anew") from None
    found = _describe(run, config)
    for key in ("seed", "actors", "envs", "max_turns"):
        if expected[key] != found[key]:
            raise ConfigError(
                f"{key} = {found[key]}, the run was made with {expected[key]}: it would not be the same run"
            )
    for agent, part in expected["agents"].items():
        for key, value in part.items():
            now = found["agents"].get(agent, {}).get(key)
            if now != value:
                raise ConfigError(
                    f"{agent}: {key} is {now}, the manifest says {value}: the files of {run.path} are not "
                    "those that the run stopped with"
                )


def is_at_rest(run: RunDirectory) -> bool:
    """Whether the run was stopped between two rounds and nothing has moved since."""
    return run.manifest_path.exists() and any(run.replay.glob(f"*/{AT_REST}"))


def keep(run: RunDirectory) -> None:
    """Copies a run at rest, to go back to; the copy before it goes once this one is whole."""
    draft, kept = run.path / "manifest.tmp", run.path / "manifest"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for part in PARTS:
        shutil.copytree(run.path / part, draft / part, ignore=shutil.ignore_patterns("snapshots"))
    shutil.copy2(run.manifest_path, draft / run.manifest_path.name)
    shutil.rmtree(kept, ignore_errors=True)
    draft.rename(kept)


def go_back(run: RunDirectory) -> bool:
    """Puts the kept copy in the place of the run's files. False: there is none, the run begins anew."""
    kept = run.path / "manifest"
    for part in PARTS:
        shutil.rmtree(run.path / part, ignore_errors=True)
    run.manifest_path.unlink(missing_ok=True)
    if not kept.exists():
        return False
    for part in PARTS:
        shutil.copytree(kept / part, run.path / part)
    shutil.copy2(kept / run.manifest_path.name, run.manifest_path)
    return True


def has_kept(run: RunDirectory) -> bool:
    """Whether there is a copy to go back to."""
    return (run.path / "manifest").exists()


def _describe(run: RunDirectory, config: Config) -> dict[str, Any]:
    progress = read_progress(run.progress_path)
    return {
        "mode": config.parallel.mode,
        "seed": config.seed,
        "actors": config.actor.count,
        "envs": config.actor.envs,
        "max_turns": config.world.max_turns,
        "epochs": sum(line["epochs"] for line in progress),
        "agent_steps": sum(line["agent_steps"] for line in progress),
        "agents": {agent: _describe_agent(run, agent) for agent in run.agents() if config.learns(agent)},
    }


def _describe_agent(run: RunDirectory, agent: str) -> dict[str, Any]:
    rounds, due_draws = read_rounds(run.replay / agent)
    newest = run.weights(agent)
    checkpoints = sorted((run.path / "checkpoints" / agent).glob("*.ckpt"), key=lambda path: int(path.stem))
    if not checkpoints:
        raise ConfigError(f"{agent} left no checkpoint: the run was not stopped between two rounds")
    files = sorted(path for path in (run.replay / agent).iterdir() if path.is_file())
    return {
        "rounds": rounds,
        "draws": due_draws,
        "version": newest.version,
        "updates": newest.updates,
        "weights_crc32": newest.checksum,
        "checkpoint": checkpoints[-1].name,
        "checkpoint_xxh3": _digest(checkpoints[-1]),
        "replay_xxh3": {path.name: _digest(path) for path in files},
    }


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
