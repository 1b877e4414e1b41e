"""A replay service by itself, and what talks to it: for benchmarks and for runs that kill it.

The service is the product's own process. It believes to have been restarted in the middle of a run (it finds
its `service-0.json`), so it starts without a parameter server. Learners and actors here use the product's
links and codec; only the playing and the training are left out.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rookery.run_directory import free_ports
from services.actor.outbox import Outbox
from services.replay.buffer import AgentBuffer
from shared.codec import Received, pack_segment, segment_checksum
from shared.config import Config, build_config
from shared.layout import Arrays
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.links.segments import SegmentSender
from shared.links.trays import LentTray, TrayLender
from shared.loop import Loop
from shared.messages import (
    Batch,
    PriorityUpdate,
    ReplayStats,
    ReplayStatsRequest,
    SampleRequest,
    Segment,
    StreamMarks,
    StreamReport,
    Token,
    expect,
)
from shared.segment_frame import NUMBERS_AT, SegmentFrame, SegmentHead, frame_of
from shared.specs import AgentSpec, Discrete, vector_observation

RUN = "alone"
SEGMENT_STEPS = 64
FLAT = AgentSpec(observation=vector_observation(128), discrete=Discrete(n=4))
SEQUENCE_AND_PRODUCED = struct.Struct("<2Q")  # the first numbers of a segment's header
UNLIMITED = 1e12  # batches that inserts and samples may run apart: the limiter never holds anybody

Array = np.ndarray[Any, Any]


def make_config(
    transport: str,
    directory: Path,
    *,
    agents: int,
    capacity_steps: int,
    batch_size: int = 512,
    n_step: int = 1,
) -> Config:
    """The config of a run with one replay service that nothing limits."""
    names = ("segments", "requests", "params", "broadcast")
    if transport == "ipc":
        places = [f"ipc://{directory}/{name}.sock" for name in names]
    else:
        places = [f"tcp://127.0.0.1:{port}" for port in free_ports(len(names))]
    segments, requests, params, broadcast = places
    return build_config(
        {
            "world": {"agents": agents, "max_turns": SEGMENT_STEPS},
            "replay": {"capacity_steps": capacity_steps, "min_steps": 1, "tolerance": UNLIMITED},
            "learner": {"batch_size": batch_size, "n_step": n_step},
            "endpoints": {
                "replay": [{"segments": segments, "requests": requests}],
                "params": params,
                "broadcast": broadcast,
            },
        }
    )


def make_buffer(directory: Path, agent: str, config: Config, spec: AgentSpec = FLAT) -> AgentBuffer:
    """The buffer of one agent as the service opens it."""
    learner = config.learner_for(agent)
    return AgentBuffer(
        directory,
        agent,
        spec,
        capacity_steps=config.replay.capacity_steps,
        segment_steps=config.segment_steps,
        n_step=learner.n_step,
        gamma=learner.gamma,
        alpha=learner.priority.alpha,
        priority_epsilon=learner.priority.epsilon,
        min_steps=config.replay.min_steps,
        samples_per_insert=config.replay.samples_per_insert,
        tolerance_samples=UNLIMITED,
        seed=config.seed,
    )


class Stream:
    """One actor's segments for one agent, each of its own contents, made again from its number at will."""

    def __init__(self, agent: str, number: int, spec: AgentSpec = FLAT) -> None:
        self.agent, self.number, self.spec = agent, number, spec
        self.incarnation = uuid.uuid4().hex
        rng = np.random.default_rng(number)
        rows = SEGMENT_STEPS + 1
        shape = (rows, *spec.observation.shape)
        self._arrays: dict[str, Array] = {
            "observation": rng.integers(0, 200, shape).astype(spec.observation.dtype.numpy),
            "action": rng.integers(0, 4, rows - 1),
            "reward": rng.random(rows - 1, dtype=np.float32),
            "terminated": np.zeros(rows - 1, bool),
            "truncated": np.arange(rows - 1) == rows - 2,
            "turn": np.arange(rows - 1, dtype=np.int32),
            "version": np.zeros(rows - 1, np.int64),
        }

    def arrays(self, sequence: int) -> dict[str, Array]:
        """The contents of segment `sequence`: no two segments are alike."""
        arrays = {name: array.copy() for name, array in self._arrays.items()}
        arrays["version"][:] = sequence
        arrays["observation"].reshape(SEGMENT_STEPS + 1, -1)[:, 0] = sequence % 251
        return arrays

    def segment(self, sequence: int, arrays: Arrays) -> Segment:
        return Segment(
            incarnation=self.incarnation,
            agent=self.agent,
            sequence=sequence,
            produced_steps=SEGMENT_STEPS * sequence,
            actor_index=self.number,
            slot=0,
            epoch=sequence,
            before=0,
            owned=SEGMENT_STEPS,
            rows=SEGMENT_STEPS + 1,
            checksum=segment_checksum(pack_segment(self.spec, arrays)),
        )


def framed(stream: Stream, sequence: int) -> SegmentFrame:
    """Segment `sequence` as an actor sends it."""
    arrays = pack_segment(stream.spec, stream.arrays(sequence))
    return frame_of(stream.segment(sequence, arrays).model_copy(update={"run": RUN}), arrays)


def fill(buffer: AgentBuffer, seed: int = 0) -> Stream:
    """Fills the ring with segments of one stream, and spreads the priorities."""
    stream = Stream(buffer.agent, 2**32 + seed, buffer.spec)
    arrays = pack_segment(buffer.spec, stream.arrays(1))
    template = stream.segment(1, arrays)
    for sequence in range(1, buffer.capacity_steps // SEGMENT_STEPS + 1):
        update = {"sequence": sequence, "produced_steps": SEGMENT_STEPS * sequence}
        if buffer.insert(template.model_copy(update=update), arrays) != "stored":
            raise RuntimeError(f"segment {sequence} was not stored")
    rng = np.random.default_rng(seed)
    for draw in range(64):
        batch = buffer.draw(draw, 16_384, 0.4)
        new = rng.exponential(size=16_384).astype(np.float32)
        buffer.update_priorities(batch["index"], batch["generation"], new)
    return stream


class ReplayProcess:
    """The service, with its files in `directory`."""

    def __init__(self, directory: Path, config: Config, spec: AgentSpec = FLAT) -> None:
        self.directory, self.config = directory, config
        (directory / "replay").mkdir(parents=True, exist_ok=True)
        specs = {f"agent_{n}": spec.model_dump(mode="json") for n in range(config.world.agents)}
        (directory / "replay" / "service-0.json").write_text(json.dumps({"run": RUN, "specs": specs}))
        self._config_path = directory / "config.yaml"
        self._config_path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._log = (directory / "replay.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.replay", "--config", str(self._config_path)]
        command += ["--run-dir", str(self.directory), "--instance", "replay-0", "--log-level", "warning"]
        self.process = subprocess.Popen(command, stderr=self._log, stdout=self._log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self._log.close()


@dataclass
class Learner:
    """Asks for batches, `in_flight` at a time, and sends priorities back if `updates`.

    Batches come through the socket, or on trays (`shared/links/trays.py`) if `trays`.
    Two that ask for one agent must begin at draws that lie far apart: a draw is served once.
    """

    config: Config
    agent: str
    batch_size: int
    in_flight: int = 4
    updates: bool = True
    trays: bool = False
    first_draw: int = 0
    batches: int = 0
    failures: int = 0
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        self._network = Network.of(self.config, self.loop)
        self._link = RequestSender(
            self._network, self.config.endpoints.replay[0].requests, identity=uuid.uuid4().hex
        )
        self._link.run = RUN
        self._token = Token(agent=self.agent, number=1)
        self._draw = self.first_draw
        self._lender = TrayLender(self.in_flight + 4, enabled=self.trays)
        self._priorities = (
            np.random.default_rng(0).exponential(size=(257, self.batch_size)).astype(np.float32)
        )

    def run(self, seconds: float) -> float:
        """Batches/s over this time."""
        while self._link.waiting < self.in_flight:
            self._ask()
        before, started = self.batches, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            self.loop.turn(block=True)
        return (self.batches - before) / elapsed

    def first_batch(self, timeout_s: float) -> float:
        """Seconds until a batch has come."""
        started, before = time.perf_counter(), self.batches
        self._ask(retry_s=0.05)
        if not self.loop.turn_until(lambda: self.batches > before, timeout_s):
            raise TimeoutError(f"no batch within {timeout_s} s")
        return time.perf_counter() - started

    def rest(self) -> None:
        """Waits for what was asked and asks no more."""
        asking, self.in_flight = self.in_flight, 0
        self._link.flush(10.0)
        self.in_flight = asking

    def stats(self) -> ReplayStats:
        return expect(self._link.call(ReplayStatsRequest()).message, ReplayStats)

    def _ask(self, retry_s: float = 1.5) -> None:
        lent = self._lender.lend()
        request = SampleRequest(
            token=self._token,
            draw=self._draw,
            batch_size=self.batch_size,
            beta=0.4,
            tray=None if lent is None else lent.tray,
        )
        self._draw += 1
        self._link.ask(
            request,
            on_reply=lambda received: self._on_batch(received, lent),
            on_failure=lambda _error: self._on_failure(lent),
            retry_s=retry_s,
            once={"tray": None},
        )

    def _on_failure(self, lent: LentTray | None) -> None:
        self.failures += 1
        if lent is not None:
            self._lender.leave(lent)
        if self._link.waiting < self.in_flight:
            self._ask()

    def _on_batch(self, received: Received, lent: LentTray | None) -> None:
        self.batches += 1
        arrays = self._rows_of(expect(received.message, Batch), received, lent)
        if self._link.waiting < self.in_flight:
            self._ask()
        if self.updates:
            priorities = self._priorities[self.batches % len(self._priorities)]
            self._link.tell(
                PriorityUpdate(token=self._token, draw=expect(received.message, Batch).draw),
                {"index": arrays["index"], "generation": arrays["generation"], "priority": priorities},
            )

    def _rows_of(self, batch: Batch, received: Received, lent: LentTray | None) -> Arrays:
        if lent is not None and batch.on_tray:
            return self._lender.take_back(lent, batch.on_tray)
        if lent is not None:
            self._lender.leave(lent)
        self._lender.note_size(received.arrays)
        return received.arrays

    def close(self) -> None:
        self._network.close()
        self.loop.close()


class Actor:
    """Pushes segments as fast as they are taken, with the window and the going back of the product's actors.

    `distinct`: every segment has contents of its own, which takes a few times as long to make.
    """

    def __init__(
        self,
        config: Config,
        stream: Stream,
        *,
        distinct: bool = False,
        on_acknowledged: Callable[[int], None] = lambda _sequence: None,
        window: int = 64,
    ) -> None:
        self.stream, self._distinct, self._on_acknowledged = stream, distinct, on_acknowledged
        self._window = window
        self.loop = Loop()
        self._network = Network.of(config, self.loop)
        replay = config.endpoints.replay[0]
        self._link = RequestSender(self._network, replay.requests, identity=stream.incarnation)
        self._link.run = RUN
        self._link.volunteered["stream_marks"] = self._on_marks
        self._sender = SegmentSender(self._network, replay.segments, queue=window)
        self._outbox = Outbox([stream.agent], window)
        # One more than can be unacknowledged: a frame that is to be sent again keeps its number.
        self._prepared = [self._made(1) for _ in range(0 if distinct else window + 1)]
        self._reporting = False
        self._reported = 0.0

    def _made(self, sequence: int) -> SegmentFrame:
        return framed(self.stream, sequence)

    def run(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._report()
            for _ in range(self._window - self._outbox.unacknowledged_segments):
                self._outbox.add(self._next())
            # A full link wakes the loop when it takes more; a full window waits for acknowledgements.
            self._outbox.pump(self.stream.agent, self._sender.send)
            self.loop.turn(block=True)

    def _next(self) -> SegmentFrame:
        sequence = self._outbox.next_sequence(self.stream.agent)
        if self._distinct:
            return self._made(sequence)
        head, arrays, data = self._prepared[sequence % len(self._prepared)]
        produced = SEGMENT_STEPS * sequence
        SEQUENCE_AND_PRODUCED.pack_into(data, NUMBERS_AT, sequence, produced)
        return SegmentFrame(SegmentHead(*head[:3], sequence, produced, *head[5:]), arrays, data)

    def _report(self) -> None:
        now = time.monotonic()
        if self._reporting or now - self._reported < 0.5:
            return
        self._reporting, self._reported = True, now
        produced = SEGMENT_STEPS * (self._outbox.next_sequence(self.stream.agent) - 1)
        report = StreamReport(
            incarnation=self.stream.incarnation, produced_steps={self.stream.agent: produced}
        )
        self._link.ask(report, on_reply=self._on_report, on_failure=self._on_silence, timeout_s=2.0)

    def _on_silence(self, _error: Exception) -> None:
        self._reporting = False

    def _on_report(self, received: Received) -> None:
        self._reporting = False
        self._take(received, reported=True)

    def _on_marks(self, received: Received) -> None:
        self._take(received, reported=False)

    def _take(self, received: Received, reported: bool) -> None:
        mark = expect(received.message, StreamMarks).marks[self.stream.agent]
        self._outbox.on_mark(self.stream.agent, mark, time.monotonic(), reported)
        self._on_acknowledged(mark.acknowledged)

    def close(self) -> None:
        self._network.close()
        self.loop.close()
