"""One consistent checkpoint of a whole run in rounds: learners, versions, replay and actors at one boundary.

A run in lockstep or sequential mode that stops between two rounds leaves files that fit together; the
manifest names them all with their checksums, and a resume first proves them. Copies of them (`keep`) are what
a run goes back to when something died in the middle of a round: played again, it comes to the same weights.
From the moment that a run is opened its manifest is gone; one that was ended before it moved is `settled`.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import xxhash

from rookery.run_directory import RunDirectory, read_progress
from services.replay.rounds import read_rounds
from shared.config import Config
from shared.errors import ConfigError
from shared.schedule import Schedule, phases_done

PARTS = ("params", "checkpoints", "replay")
READ_BYTES = 1 << 24


def write_manifest(run: RunDirectory, config: Config) -> dict[str, Any]:
    """Describes the run as it lies there, stopped between two rounds; ConfigError if its parts do not fit."""
    manifest = _describe(run, config)
    _check_fit(run, manifest)
    temporary = run.manifest_path.with_suffix(".tmp")
    temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    temporary.replace(run.manifest_path)
    return manifest


def _check_fit(run: RunDirectory, manifest: dict[str, Any]) -> None:
    """A learner that could not leave its last checkpoint, for example, is of another round than replay."""
    if not manifest["agents"]:
        raise ConfigError(f"{run.path} has no agent that learned anything yet")
    found = {
        f"{agent}'s {what}": number
        for agent, part in manifest["agents"].items()
        for what, number in (
            ("replay", part["rounds"]),
            ("weights", phases_done(part["version"])),
            ("checkpoint", part["checkpoint_rounds"]),
        )
    }
    if len(set(found.values())) > 1:
        rounds = ", ".join(f"{what} is at round {number}" for what, number in found.items())
        raise ConfigError(f"{run.path} was not stopped between two rounds: {rounds}")


def check_manifest(run: RunDirectory, config: Config) -> None:
    """Proves that everything is still as it was when the run stopped, or says what is not."""
    try:
        expected = json.loads(run.manifest_path.read_text())
        settings, agents = expected["settings"], dict(expected["agents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run.manifest_path} cannot be read ({error!r}); begin the run anew") from None
    found = _describe(run, config)
    for key, value in found["settings"].items():
        if settings.get(key) != value:
            raise ConfigError(
                f"{key} = {value}, the run was made with {settings.get(key)}: it would not be the same run"
            )
    for agent in sorted(agents.keys() | found["agents"].keys()):
        before, now = agents.get(agent, {}), found["agents"].get(agent, {})
        for key in sorted(before.keys() | now.keys()):
            if now.get(key) != before.get(key):
                raise ConfigError(
                    f"{agent}: {key} is {now.get(key)}, the manifest says {before.get(key)}: the files of "
                    f"{run.path} are not those that the run stopped with"
                )


def settle(run: RunDirectory, config: Config) -> bool:
    """Writes the manifest of a run that has none and yet lies between two rounds: whether it does.

    It was opened, and ended before its first round entered: by Ctrl-C, by a limit that was reached, by kill.
    """
    try:
        rounds = next(iter(write_manifest(run, config)["agents"].values()))["rounds"]
    except ConfigError:
        return False
    schedule = Schedule.of(config)
    played = sum(line["env_steps"] for line in read_progress(run.progress_path))
    if played == rounds * schedule.round_steps:
        return True
    run.manifest_path.unlink()  # actors have told of rounds that nobody has
    return False


def is_at_rest(run: RunDirectory) -> bool:
    """Whether the run was stopped between two rounds and has not been opened since."""
    return run.manifest_path.exists()


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
    learning = [agent for agent in run.agents() if config.learns(agent)]
    return {
        "mode": config.parallel.mode,
        "settings": {
            "seed": config.seed,
            "actor.count": config.actor.count,
            "actor.envs": config.actor.envs,
            "world.max_turns": config.world.max_turns,
            "replay.min_steps": config.replay.min_steps,
            "replay.samples_per_insert": config.replay.samples_per_insert,
            "parallel.train_interval": config.parallel.train_interval,
            "learner.batch_size": {agent: config.learner_for(agent).batch_size for agent in learning},
        },
        "epochs": sum(line["epochs"] for line in progress),
        "agent_steps": sum(line["agent_steps"] for line in progress),
        "agents": {agent: _describe_agent(run, agent) for agent in learning},
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
        "checkpoint_rounds": _checkpoint_rounds(checkpoints[-1]),
        "checkpoint_xxh3": _digest(checkpoints[-1]),
        "replay_xxh3": {path.name: _digest(path) for path in files},
    }


def _checkpoint_rounds(path: Path) -> int:
    """The round that a learner's checkpoint is of. Only its header is read: torch is slow to load."""
    try:
        with path.open("rb") as file:
            file.readline()  # what the parameter server says of it
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, READ_BYTES)))
        return int(json.loads(header["__metadata__"]["counters"])["rounds"])
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(f"{path} is not a checkpoint of a run in rounds ({error!r})") from None


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
