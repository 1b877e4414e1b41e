"""`rookery replay RUN ...`: snapshots of what was experienced, and the pace of training.

`snapshot`, `limiter` and `stats` ask a running run. `restore` works on the files of one that is not running:
it takes the locks of its services first, moves the present buffers aside and deletes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rookery.arguments import add_run_argument
from rookery.client import RunClient
from rookery.run_directory import RunDirectory, open_run
from services.replay import snapshot_files
from services.replay.snapshot_files import DamagedSnapshotError, Manifest
from shared.config import Config
from shared.errors import ConfigError, PeerSilent
from shared.messages import BufferStats, ReplayStats
from shared.ownership import own

SNAPSHOT_TIMEOUT_S = 600.0
MOST_TIMEOUT_S = 86_400.0


def add_replay_command(commands: Any) -> None:
    """`rookery replay` with its own commands."""
    replay = commands.add_parser(
        "replay",
        help="snapshots of a run's experience, and the pace of training",
        description="Takes and restores snapshots of all buffers, and changes how often a step is drawn.",
    )
    add_run_argument(replay)
    actions = replay.add_subparsers(required=True, metavar="ACTION")
    _add_snapshot(actions)
    _add_restore(actions)
    _add_limiter(actions)
    _add_stats(actions)


def _add_snapshot(actions: Any) -> None:
    parser = actions.add_parser(
        "snapshot",
        help="put all buffers of a running run on the disk, as they are now",
        description="Steps, priorities, stream marks, limiter and counters of every agent, as they are now, "
        "go to RUN/replay/snapshots/<number>. Nothing stops meanwhile. The newest "
        f"{snapshot_files.KEEP} are kept.",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=SNAPSHOT_TIMEOUT_S,
        metavar="S",
        help="seconds to wait until it is on the disk (default: %(default)g); after that it still goes on",
    )
    parser.set_defaults(command=snapshot_command)


def _add_restore(actions: Any) -> None:
    parser = actions.add_parser(
        "restore",
        help="bring back a snapshot of a run that is not running",
        description="Puts a snapshot in the place of the buffers. These go to RUN/replay/before-restore-<n>. "
        "A damaged snapshot is recognised by its checksums and the one before it is taken. Weights and "
        "learners' checkpoints stay as they are. Then `rookery train --resume RUN`.",
    )
    parser.add_argument(
        "--number", type=int, metavar="N", help="this one and no other (default: the newest undamaged one)"
    )
    parser.set_defaults(command=restore_command)


def _add_limiter(actions: Any) -> None:
    parser = actions.add_parser(
        "limiter",
        help="change how often a step is drawn, while the run trains",
        description="Applies from now on to all agents, over restarts too, until the run's config says "
        "something else. Without options: prints the present setting.",
    )
    parser.add_argument(
        "--samples-per-insert",
        type=float,
        metavar="X",
        help="how often a step is drawn on average; more makes actors wait for learners, less the reverse",
    )
    parser.add_argument("--min-steps", type=int, metavar="N", help="no batch is drawn from fewer steps")
    parser.set_defaults(command=limiter_command)


def _add_stats(actions: Any) -> None:
    parser = actions.add_parser(
        "stats",
        help="how full, how fast, who waits, which snapshots there are",
        description="Each agent's buffer and limiter, what replay refused, and the snapshots there are.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=stats_command)


# --- while it runs ----------------------------------------------------------------------------------------


def snapshot_command(options: argparse.Namespace) -> int:
    """`rookery replay RUN snapshot`."""
    if not 0.0 < options.timeout <= MOST_TIMEOUT_S:
        raise ConfigError(
            f"--timeout {options.timeout:g}: more than 0 and at most {MOST_TIMEOUT_S:g} seconds"
        )
    run = open_run(options.run)
    root = snapshot_files.root_of(run.replay)
    with RunClient(run.config()) as client:
        # Replay's disk may be on another machine, and may have been seen by nobody here.
        number = max(client.newest_snapshot(), *snapshot_files.numbers(root), 0) + 1
        parts = client.take_snapshot(number, options.timeout)
    steps = {agent: count for part in parts for agent, count in part.steps.items()}
    size_mb = sum(part.size_bytes for part in parts) / 1e6
    print(f"snapshot {number}: {_listed(steps)}; {size_mb:,.1f} MB in {root / str(number)}, on replay's disk")
    return 0


def limiter_command(options: argparse.Namespace) -> int:
    """`rookery replay RUN limiter`."""
    run = open_run(options.run)
    wanted = {"samples_per_insert": options.samples_per_insert, "min_steps": options.min_steps}
    values = {name: float(value) for name, value in wanted.items() if value is not None}
    with RunClient(run.config()) as client:
        if values:
            client.set_on_replays(values)
        replays = client.replay_stats()
    for agent, buffer in _buffers(replays):
        print(f"{agent}: {_limiter_words(buffer)}")
    return 0


def stats_command(options: argparse.Namespace) -> int:
    """`rookery replay RUN stats`."""
    run = open_run(options.run)
    with RunClient(run.config()) as client:
        replays = client.replay_stats()
    snapshots = snapshots_of(run)
    if options.json:
        stats = [each.model_dump(mode="json") if each else None for each in replays]
        print(json.dumps({"replay": stats, "snapshots": snapshots}, indent=2))
        return 0
    for number, each in enumerate(replays):
        if each is None:
            print(f"replay-{number} does not answer")
            continue
        for agent, buffer in each.buffers.items():
            _print_buffer(agent, buffer)
        if each.counters:
            print(f"replay-{number} counts " + _listed(each.counters, unit=""))
    for number, problem in snapshots.items():
        print(f"snapshot {number}: {problem or 'there'}")
    return 0


def _print_buffer(agent: str, buffer: BufferStats) -> None:
    drawn = buffer.sampled_steps / buffer.inserted_steps if buffer.inserted_steps else 0.0
    print(
        f"{agent}: {buffer.drawable_steps:,} of {buffer.capacity_steps:,} steps; {buffer.inserted_steps:,} "
        f"inserted, {buffer.sampled_steps:,} drawn ({drawn:.2f} times each)"
    )
    print(f"  limiter: {_limiter_words(buffer)}")
    if buffer.limiter.blocked:
        limiter = buffer.limiter
        print(f"  {limiter.blocked} wait since {limiter.since_s:.1f} s: {limiter.reason}")


def _limiter_words(buffer: BufferStats) -> str:
    limiter = buffer.limiter
    return (
        f"{limiter.samples_per_insert:g} samples per insert, batches from {limiter.min_steps:,} steps on, "
        f"tolerance {limiter.tolerance_samples:,.0f} samples"
    )


def _buffers(replays: list[ReplayStats | None]) -> Iterator[tuple[str, BufferStats]]:
    for number, each in enumerate(replays):
        if each is None:
            raise PeerSilent(f"replay-{number} does not answer; its setting is not known")
        yield from each.buffers.items()


def _listed(counts: dict[str, int], unit: str = " steps") -> str:
    return ", ".join(f"{name} {count:,}{unit}" for name, count in counts.items())


def snapshots_of(run: RunDirectory) -> dict[int, str]:
    """The snapshots on the disk, each with what can be seen at once to be wrong with it; empty: nothing."""
    root = snapshot_files.root_of(run.replay)
    agents, found = run.learning_agents(), {}
    for number in snapshot_files.numbers(root):
        try:
            for agent in agents:
                snapshot_files.read_manifest(root / str(number) / agent)
            found[number] = ""
        except DamagedSnapshotError as error:
            found[number] = f"damaged: {error}"
    return found


# --- while it does not ------------------------------------------------------------------------------------


def restore_command(options: argparse.Namespace) -> int:
    """`rookery replay RUN restore`."""
    run = open_run(options.run)
    agents = run.learning_agents()
    if not agents:
        raise ConfigError(f"{run.path} has no agents yet: nothing was ever stored in it")
    mode = run.config().parallel.mode
    if mode != "async":
        raise ConfigError(
            f"{run.path} was trained in mode {mode}: its buffers, weights and learners fit together, and one "
            "without the others cannot go on; such a run goes back as a whole, to RUN/manifest"
        )
    with stopped(run, run.config()):
        number, manifests = _choose(snapshot_files.root_of(run.replay), options.number, agents)
        aside = snapshot_files.restore_run(run.replay, number, manifests)
    steps = {agent: manifest.steps for agent, manifest in manifests.items()}
    print(f"restored snapshot {number}: {_listed(steps)}")
    if aside is not None:
        print(f"the buffers that were there: {aside}")
    print(f"continue with: rookery train --resume {run.path}")
    return 0


def _choose(root: Path, number: int | None, agents: list[str]) -> tuple[int, dict[str, Manifest]]:
    if number is None:
        return snapshot_files.newest_whole(root, agents)
    if number not in snapshot_files.numbers(root):
        kept = ", ".join(map(str, snapshot_files.numbers(root))) or "none"
        raise ConfigError(f"there is no snapshot {number}; kept are: {kept}")
    try:
        return number, snapshot_files.prove_all(root, number, agents)
    except DamagedSnapshotError as error:
        raise ConfigError(
            f"snapshot {number} is damaged: {error}. Without --number the newest undamaged one is taken"
        ) from None


@contextmanager
def stopped(run: RunDirectory, config: Config) -> Iterator[None]:
    """Holds the locks of the parameter server and of all replay services: none of them can run."""
    paths = [run.path / "params" / "service.lock"]
    paths += [run.replay / f"service-{number}.lock" for number in range(len(config.endpoints.replay))]
    held: list[int] = []
    try:
        for path in paths:
            try:
                held.append(own(path))
            except ConfigError as error:
                raise ConfigError(f"{run.path} is running; stop it before restoring: {error}") from None
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
