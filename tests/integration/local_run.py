"""A small run on loopback: starts its processes, asks them, and reads what they left on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from waiting import wait_for

from rookery.client import RunClient
from rookery.run_directory import create_run
from services.replay.records import incarnation_text
from services.replay.ring import Ring
from services.replay.streams import Streams
from shared.codec import segment_checksum
from shared.config import Config, load_config
from shared.errors import RookeryError
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.loop import Loop
from shared.messages import (
    Hello,
    Ledger,
    LedgerRequest,
    ReplayStats,
    Reply,
    Request,
    RunStatus,
    ServiceStatus,
)
from shared.specs import AgentSpec

LEASE_S = 1.5
START_S = 60.0  # until a run trains: a dozen seconds of imports on two busy cores
PATIENCE_S = 30.0  # until anything else happens

SMALL = [
    "run.minutes=null",
    "run.eval_episodes=0",
    "world.agents=2",
    "actor.envs=4",
    "actor.journal=true",
    "replay.capacity_steps=400000",  # nothing is overwritten while a test runs
    "replay.min_steps=200",
    "replay.samples_per_insert=1",
    "learner.network.hidden=[32]",
    "learner.batch_size=32",
    "learner.publish_updates=10",
    "learner.publish_s=0.3",
    "learner.checkpoint_s=1",
    f"param_server.lease_s={LEASE_S}",
    "param_server.heartbeat_s=0.3",
]


def settings_of(values: dict[str, Any]) -> list[str]:
    """`actor__envs=2` as the setting `actor.envs=2`; later ones win over those of a small run."""
    return [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]


class LocalRun:
    """One run in a directory of its own, started by hand (`start`) or by the launcher (`train`)."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = [*SMALL, *settings_of(settings)]
        self.popens: list[subprocess.Popen[bytes]] = []
        self.versions: dict[str, int] = {}  # the highest seen of each agent
        self.output_path = path.parent / f"{path.name}.output"

    # --- processes ----------------------------------------------------------------------------------------

    def train(self, *flags: str) -> subprocess.Popen[bytes]:
        """`rookery train` with this run's settings, or with --resume among the flags: continued."""
        command = [sys.executable, "-m", "rookery.cli", "train", *flags]
        if "--resume" not in flags:
            command += ["--run-dir", str(self.path)]
            command += [part for setting in self.settings for part in ("--set", setting)]
        return self._popen(command, self.output_path)

    def create(self) -> Config:
        """The directory and the config of a run whose services are started by hand."""
        return create_run(load_config(None, self.settings, environment={}), self.path)[1]

    def start(self, service: str, instance: str = "", *arguments: str) -> subprocess.Popen[bytes]:
        """One service alone, as a person would start it."""
        if not (self.path / "config.yaml").exists():
            self.create()
        instance = instance or service
        command = [sys.executable, "-m", f"services.{service}", "--config", str(self.path / "config.yaml")]
        command += ["--run-dir", str(self.path), "--instance", instance, *arguments]
        return self._popen(command, self.path / "logs" / f"{instance}.log")

    def start_all(self, learners: int = 2) -> dict[str, subprocess.Popen[bytes]]:
        """A parameter server, a replay, an actor and learners, by hand: nobody starts them again."""
        services = {name: self.start(name) for name in ("param_server", "replay", "actor")}
        for number in range(learners):
            services[f"learner-{number}"] = self.start("learner", f"learner-{number}")
        return services

    def command(self, *arguments: str) -> str:
        """What `rookery ...` prints."""
        command = [sys.executable, "-m", "rookery.cli", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def _popen(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with output.open("ab") as file:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **threads}
            )
        self.popens.append(popen)
        return popen

    def processes(self) -> list[psutil.Process]:
        """Every living process of this run, found by its directory: also those that the launcher started."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.path) in (process.info["cmdline"] or [])
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def service_processes(self) -> dict[str, psutil.Process]:
        """By instance, those of the services."""
        found = {}
        for process in self.processes():
            command = process.info["cmdline"]
            if "--instance" in command:
                found[command[command.index("--instance") + 1]] = process
        return found

    def kill(self, instance: str) -> int:
        """kill -9 of one service; returns the pid that is gone."""
        process = self.service_processes()[instance]
        process.kill()
        return process.pid

    def interrupt(self, launcher: subprocess.Popen[bytes], timeout_s: float = 15.0) -> dict[str, Any]:
        """Ctrl-C for the launcher; returns the summary that it leaves."""
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout_s) == 0, self.output()
        assert not self.processes(), "the launcher left processes behind"
        return self.summary()

    def end_by_hand(self, services: dict[str, subprocess.Popen[bytes]]) -> None:
        """SIGTERM in the order in which nothing is lost: actors, learners, replay, parameter server."""
        place = {"actor": 0, "learner": 1, "replay": 2, "param_server": 3}
        order = sorted(services, key=lambda name: place[name.split("-")[0]])
        for name in order:
            end(services[name], name)
        assert not self.processes()

    def kill_everything(self) -> None:
        """The last resort of the fixture."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for popen in self.popens:
            if popen.poll() is None:
                popen.kill()
            popen.wait(10)
        wait_for(lambda: not self.processes(), f"the processes of {self.path} are gone", 10)

    # --- questions ----------------------------------------------------------------------------------------

    def config(self) -> Config:
        return load_config(self.path / "config.yaml", environment={})

    def status(self) -> RunStatus | None:
        """The run's status; None while the parameter server does not answer."""
        if not (self.path / "config.yaml").exists():
            return None
        try:
            with RunClient(self.config(), timeout_s=1.0) as client:
                status = client.status()
        except RookeryError:
            return None
        self._check_versions(status)
        return status

    def _check_versions(self, status: RunStatus) -> None:
        """Whatever a test does: an agent's version never goes back."""
        for agent, own in status.agents.items():
            assert own.version >= self.versions.get(agent, 0), f"{agent} went back to {own.version}"
            self.versions[agent] = own.version

    def replay_stats(self) -> ReplayStats:
        with RunClient(self.config(), timeout_s=10.0) as client:
            stats = client.replay_stats()[0]
        assert stats is not None
        return stats

    def ledger(self) -> Ledger:
        answer = self.ask(LedgerRequest(), self.config().endpoints.replay[0].requests)
        assert isinstance(answer, Ledger)
        return answer

    def ask(self, request: Request, endpoint: str) -> Reply:
        with Peer(self.config()) as peer:
            return peer.ask(request, endpoint)

    def trains(self, more_than: RunStatus | None = None) -> RunStatus | None:
        """The status, if all learners' updates and the steps are beyond the earlier ones; else None."""
        status = self.status()
        if status is None or not status.agents:
            return None
        steps = more_than.agent_steps if more_than else 0
        learning = self.config().learning_agents
        updates = {name: more_than.agents[name].updates if more_than else 0 for name in learning}
        beyond = all(status.agents[name].updates > updates[name] for name in learning)
        return status if beyond and status.agent_steps > steps else None

    def wait_until_known(self) -> RunStatus:
        """The status as soon as the parameter server answers."""
        return wait_for(self.status, "the parameter server answers")

    def wait_until_training(self) -> RunStatus:
        return wait_for(self.trains, "the run trains", START_S)

    def wait_for_progress(self, since: RunStatus, what: str, timeout_s: float = PATIENCE_S) -> RunStatus:
        """Until more was played and every agent has more updates than then."""
        return wait_for(lambda: self.trains(since), what, timeout_s)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    def output(self) -> str:
        return self.output_path.read_text(errors="replace") if self.output_path.exists() else ""

    def log(self, instance: str) -> list[dict[str, Any]]:
        """What one service said, event by event."""
        lines = (self.path / "logs" / f"{instance}.log").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events(self, instance: str) -> list[str]:
        return [line["event"] for line in self.log(instance)]

    def tails(self) -> str:
        """The end of everything that was logged, for whoever reads a failed test's report."""
        logs = sorted((self.path / "logs").glob("*.log")) if (self.path / "logs").exists() else []
        return self.output()[-500:] + "".join(f"\n{log.name}: {log.read_text()[-400:]}" for log in logs)

    # --- what is on the disk ------------------------------------------------------------------------------

    def journal(self) -> dict[tuple[str, str], dict[int, tuple[int, int]]]:
        """What the actors sent, by (incarnation, agent): sequence to (owned, checksum)."""
        streams: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        for path in (self.path / "logs").glob("journal-*.txt"):
            for line in path.read_text().splitlines():
                incarnation, agent, sequence, owned, crc = line.split()
                stream = streams.setdefault((incarnation, agent), {})
                assert int(sequence) not in stream, f"{path.name} has {agent} {sequence} twice"
                stream[int(sequence)] = (int(owned), int(crc))
        return streams

    def stored(self) -> StoredRows:
        """What the rings hold; only while no replay runs."""
        return StoredRows(self.path / "replay", self.config())


def end(popen: subprocess.Popen[bytes], name: str = "the service", timeout_s: float = 15.0) -> None:
    """SIGTERM, and it must end well."""
    popen.send_signal(signal.SIGTERM)
    assert popen.wait(timeout_s) == 0, f"{name} ended with {popen.returncode}"


def service_named(status: RunStatus, instance: str) -> ServiceStatus:
    return next(service for service in status.services if service.instance == instance)


@dataclass(frozen=True)
class StoredSegment:
    """A committed slot of a ring, as far as the tests ask."""

    owned: int
    checksum: int  # of the rows that lie there, computed anew
    actor_index: int
    epoch: int


class StoredRows:
    """The rings of all agents, opened as replay opens them."""

    def __init__(self, directory: Path, config: Config) -> None:
        known = json.loads((directory / "service-0.json").read_text())
        self.specs = {agent: AgentSpec.model_validate(spec) for agent, spec in known["specs"].items()}
        self.rings: dict[str, Ring] = {}
        self.marks: dict[tuple[str, str], int] = {}
        self.streams: dict[tuple[str, str], dict[int, StoredSegment]] = {}
        steps = config.segment_steps
        for agent, spec in self.specs.items():
            if not config.learns(agent):
                continue
            slots = -(-config.replay.capacity_steps // steps)
            ring = Ring(directory / agent, spec, slots, steps, config.learner_for(agent).n_step)
            assert ring.state["damaged_slots"] == 0
            self.rings[agent] = ring
            self._read(agent, ring, Streams(directory / agent / "streams", now=0.0))

    def _read(self, agent: str, ring: Ring, streams: Streams) -> None:
        for slot in ring.valid_slots().tolist():
            record = ring.metadata[slot]
            incarnation, sequence = incarnation_text(record["incarnation"]), int(record["sequence"])
            self.marks[incarnation, agent] = streams.mark(incarnation)
            stream = self.streams.setdefault((incarnation, agent), {})
            assert sequence not in stream, f"{agent} {sequence} of {incarnation} is stored twice"
            stream[sequence] = StoredSegment(
                owned=int(record["owned"]),
                checksum=segment_checksum(ring.slot_arrays(slot)),
                actor_index=int(record["actor_index"]),
                epoch=int(record["epoch"]),
            )

    @property
    def steps(self) -> int:
        return sum(segment.owned for stream in self.streams.values() for segment in stream.values())


def assert_journal_equals_ring(run: LocalRun, killed: Sequence[str] = ()) -> StoredRows:
    """Each segment that an actor sent is stored once, byte for byte; of killed actors, up to the mark."""
    journal, stored = run.journal(), run.stored()
    assert journal, "no actor wrote a journal"
    assert set(stored.streams) <= set(journal), "rows of streams that no actor sent"
    for key, sent in journal.items():
        rows = {sequence: (own.owned, own.checksum) for sequence, own in stored.streams.get(key, {}).items()}
        expected = sent
        if key[0] in killed:
            mark = stored.marks.get(key, 0)
            expected = {sequence: line for sequence, line in sent.items() if sequence <= mark}
        assert rows == expected, f"stream {key}: {len(rows)} stored, {len(expected)} expected"
    return stored


class Peer:
    """A stranger who speaks the protocol: asks anything of anyone, as whoever it likes."""

    def __init__(self, config: Config, incarnation: str = "") -> None:
        self.config = config
        self.incarnation = incarnation or uuid.uuid4().hex
        self.loop = Loop()
        self.network = Network.of(config, self.loop)
        self.links: dict[str, RequestSender] = {}
        self.run = ""

    def __enter__(self) -> Peer:
        hello = Hello(service="client", instance="test", incarnation=self.incarnation)
        self.run = self.ask(hello, self.config.endpoints.params).run_id  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_exception: object) -> None:
        self.network.close()
        self.loop.close()

    def ask(self, request: Request, endpoint: str, arrays: Any = None, timeout_s: float = 15.0) -> Any:
        """The answer, or the error that the refusal is."""
        return self.link(endpoint).call(request, arrays, timeout_s=timeout_s).message

    def link(self, endpoint: str) -> RequestSender:
        if endpoint not in self.links:
            self.links[endpoint] = RequestSender(self.network, endpoint, identity=self.incarnation)
        self.links[endpoint].run = self.run
        return self.links[endpoint]
