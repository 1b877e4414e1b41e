"""A run's directory: where it lies, what is in it, and the ports it keeps.

config.yaml   as resolved, endpoints included      logs/         one file for each process
summary.json  written at the end                   params/       the parameter server's
plots/        pictures                             checkpoints/  the parameter server's
                                                   replay/       the replay services'
"""

from __future__ import annotations

import json
import random
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

from services.param_server.progress import parsed_line
from services.param_server.version_file import DamagedFileError, StoredVersion, read_version
from shared.config import Config, build_config, dump_config, load_config, merged
from shared.errors import ConfigError

# Below the range from which the system takes the ports of outgoing connections (32768 and up): a service that
# is down for a moment must find its port free, and nobody may connect to himself by accident.
PORTS = range(20_000, 32_000)


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def manifest_path(self) -> Path:
        """Of a run in rounds, while it is stopped: rookery/manifest.py."""
        return self.path / "manifest.json"

    @property
    def lock_path(self) -> Path:
        """Held by whoever trains this run in rounds: between two legs no service is there to ask."""
        return self.path / "train.lock"

    @property
    def progress_path(self) -> Path:
        return self.path / "params" / "progress.jsonl"

    @property
    def replay(self) -> Path:
        return self.path / "replay"

    def config(self) -> Config:
        """The run's config as it was resolved; the environment does not change a run that exists."""
        return load_config(self.config_path, environment={})

    def write_config(self, config: Config) -> None:
        temporary = self.config_path.with_suffix(".tmp")
        temporary.write_text(dump_config(config))
        temporary.replace(self.config_path)

    def elapsed_s(self) -> float:
        """The run clock as the parameter server last stored it."""
        try:
            return float(json.loads((self.path / "params" / "run.json").read_text())["elapsed_s"])
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return 0.0

    def agents(self) -> list[str]:
        """The agents that play, in acting order; none before the first actor has come."""
        specs = self.path / "params" / "specs.json"
        return list(json.loads(specs.read_text())) if specs.exists() else []

    def learning_agents(self) -> list[str]:
        """Those of them that have weights and a buffer."""
        config = self.config()
        return [agent for agent in self.agents() if config.learns(agent)]

    def weights(self, agent: str, version: int | None = None) -> StoredVersion:
        """The newest readable version of an agent's weights, or the given one."""
        folder = self.path / "params" / "agents" / agent
        kept = sorted((int(path.stem) for path in folder.glob("*.safetensors")), reverse=True)
        if version is not None and version not in kept:
            raise ConfigError(f"agent {agent} has no version {version}; kept are {sorted(kept)}")
        for number in [version] if version is not None else kept:
            try:
                return read_version(folder / f"{number:08d}.safetensors", agent, number)
            except (DamagedFileError, FileNotFoundError) as error:
                if version is not None:
                    raise ConfigError(f"version {version} of {agent} cannot be read: {error}") from None
        raise ConfigError(f"{self.path} has no weights of {agent} yet")


def open_run(path: Path) -> RunDirectory:
    """An existing run, or ConfigError that says what is missing."""
    run = RunDirectory(path)
    if not run.config_path.exists():
        raise ConfigError(f"{path} is not a run: it has no config.yaml")
    return run


def create_run(config: Config, path: Path | None) -> tuple[RunDirectory, Config]:
    """A new run's directory, with free ports written into its config."""
    target = path or (Path(config.run.dir) if config.run.dir else _fresh_path(config.world.name))
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a directory; choose another --run-dir")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(
            f"{target} is not empty; continue it with --resume {target}, or choose another --run-dir"
        )
    target.mkdir(parents=True, exist_ok=True)
    run = RunDirectory(target)
    config = with_free_ports(config, target)
    run.logs.mkdir()
    run.plots.mkdir()
    run.write_config(config)
    return run, config


def with_free_ports(config: Config, path: Path) -> Config:
    """The config with local endpoints that nothing else uses now."""
    ports = iter(free_ports(2 + 2 * config.replay.services))
    local: dict[str, Any] = {
        "params": _local(next(ports)),
        "broadcast": _local(next(ports)),
        "replay": [
            {"segments": _local(next(ports)), "requests": _local(next(ports))}
            for _ in range(config.replay.services)
        ],
    }
    return build_config(
        merged(config.model_dump(mode="json"), {"endpoints": local, "run": {"dir": str(path)}})
    )


def free_ports(count: int) -> list[int]:
    """Ports that can be bound now, all held until all are found so that none is given twice."""
    sockets: list[socket.socket] = []
    try:
        for port in random.sample(PORTS, len(PORTS)):
            candidate = socket.socket()
            sockets.append(candidate)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                sockets.pop().close()
            if len(sockets) == count:
                return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
    raise ConfigError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def ports_are_free(config: Config) -> bool:
    """Whether the run's own endpoints can be bound again."""
    endpoints = [config.endpoints.params, config.endpoints.broadcast]
    for replay in config.endpoints.replay:
        endpoints += [replay.segments, replay.requests]
    for endpoint in endpoints:
        port = int(endpoint.rsplit(":", 1)[1])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def read_progress(path: Path) -> list[dict[str, Any]]:
    """The taken epoch summaries, in order; what the parameter server would not count is left out."""
    if not path.exists():
        return []
    lines = (parsed_line(raw) for raw in path.read_bytes().splitlines(keepends=True))
    return [line.model_dump() for line in lines if line is not None]


def _local(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def _fresh_path(world: str) -> Path:
    stem = f"{world.rsplit(':', 1)[-1]}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
    return next(Path("runs") / name for name in names if not (Path("runs") / name).exists())
