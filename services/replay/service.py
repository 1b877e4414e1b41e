"""The replay service: takes segments in on a PULL, serves batches on a ROUTER, never stops reading either.

One AgentBuffer for each of its agents. A sample request is held until it can be served or its deadline
passes. A segment is acknowledged after its commit; while the limiter says that inserts run ahead,
acknowledgements are withheld, which makes actors wait once their windows are full. Without a live learner
nothing is withheld.

Next: services/replay/ring.py
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pydantic

from services.replay import snapshot_files
from services.replay.buffer import AgentBuffer
from services.replay.opening import in_rounds, open_buffer, tolerance_samples
from services.replay.rounds import RoundBuffer
from services.replay.snapshot_desk import SnapshotDesk
from shared.config import Config
from shared.errors import BadMessage, ConfigError, NoTray, Refused
from shared.layout import Array, Block
from shared.links.requests import Incoming, OnIncoming, RequestReceiver
from shared.links.segments import SegmentReceiver
from shared.links.trays import TrayTable
from shared.logs import get_logger
from shared.messages import (
    Batch,
    BufferStats,
    Ledger,
    LedgerRequest,
    LimiterStats,
    Mark,
    PhaseGrant,
    PhaseRequest,
    PriorityUpdate,
    ReplayStats,
    ReplayStatsRequest,
    RunNotice,
    RunState,
    SampleRequest,
    StreamMarks,
    StreamReport,
    Token,
)
from shared.ownership import own
from shared.placement import replay_of
from shared.segment_frame import SegmentHead
from shared.service import Service
from shared.specs import AgentSpec

log = get_logger()

TICK_S = 0.25
ACKNOWLEDGE_S = 0.005  # while segments keep coming: hearing of some costs an actor as much as sending one
GAP_PAUSE_S = 0.2  # a stream with a gap is told so at most this often
BATCHES_A_TURN = 8  # for one agent, before segments get their turn
REMEMBERED_DRAWS = 256
GRANTS_AHEAD = 8  # a token may come before the notice of its grant, but not many grants before

_SPECS: pydantic.TypeAdapter[dict[str, AgentSpec]] = pydantic.TypeAdapter(dict[str, AgentSpec])


_NO_ROWS: dict[str, Array] = {
    "index": np.empty(0, np.int64),
    "generation": np.empty(0, np.uint64),
    "priority": np.empty(0, np.float32),
}

DrawKey = tuple[int, int]  # a token's number and a draw: one batch, however often it is asked for


@dataclass(slots=True)
class HeldSample:
    """A sample request that waits for its turn."""

    peer: bytes
    message: SampleRequest
    key: DrawKey
    until: float


@dataclass(slots=True)
class HeldPhase:
    """A learner that waits for a round to be stored."""

    peer: bytes
    message: PhaseRequest
    until: float


@dataclass(slots=True)
class AgentDesk:
    """One agent's buffer with everybody who waits at it."""

    buffer: AgentBuffer
    trays: TrayTable  # its learner's
    rounds: RoundBuffer | None = None  # in lockstep: decides what enters and what is drawn
    phases: list[HeldPhase] = field(default_factory=list)
    held: dict[DrawKey, HeldSample] = field(default_factory=dict)  # in the order of their coming
    served: OrderedDict[DrawKey, None] = field(default_factory=OrderedDict)  # the newest of them
    withheld: set[str] = field(default_factory=set)  # incarnations whose acknowledgements wait
    learner_heard: float = -1e9
    absent: bool = True  # no learner: what inserts run ahead is forgiven when one comes
    blocked: str = ""
    blocked_since: float = 0.0

    def remember(self, key: DrawKey) -> None:
        """This draw was served; a repeat does not count again."""
        self.served[key] = None
        if len(self.served) > REMEMBERED_DRAWS:
            self.served.popitem(last=False)

    def reason(self, batch_size: int = 1) -> str:
        """Who waits for what, in words; empty when nobody has to wait."""
        return self.buffer.limiter.reason(batch_size) if self.rounds is None else self.rounds.reason()

    @property
    def batch_size(self) -> int:
        """Of the request that waits longest."""
        return next((held.message.batch_size for held in self.held.values()), 1)


class ReplayService(Service):
    """The buffers of some agents, with their links."""

    name = "replay"

    def __init__(self, config: Config, run_dir: Path, instance: str, number: int = 0) -> None:
        known = len(config.endpoints.replay)
        if not 0 <= number < known:
            raise ConfigError(f"replay service {number}: endpoints.replay has {known}, numbered from 0")
        super().__init__(config, run_dir, instance)
        self.number = number
        self.directory = run_dir / "replay"
        self.lock: int | None = None
        self.desks: dict[str, AgentDesk] = {}
        self.acknowledged: dict[tuple[str, str], int] = {}  # (incarnation, agent): last number acknowledged
        self.dirty: dict[str, set[str]] = {}  # incarnation: agents whose marks moved
        self._acknowledged_at = 0.0
        self.gap_told: dict[tuple[str, str], float] = {}
        self.leases: RunNotice | None = None
        self.counters: Counter[str] = Counter()
        self.syncer = ThreadPoolExecutor(1, "sync")
        self.syncing: Future[None] | None = None
        self._rates = (time.monotonic(), 0, 0)

    # --- start ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A restarted replay knows its run and its agents from its own files and waits for nobody."""
        self.lock = own(self.directory / f"service-{self.number}.lock")
        known = self._read_known()
        if known is None:
            self.join()
            specs = self.get_specs()
            self._write_known(self.params.run, specs)
        else:
            run, specs = known
            self.join_known(run)
        for agent, spec in specs.items():
            if agent == snapshot_files.RESERVED:
                raise ConfigError(
                    f"an agent cannot be called {agent!r}: that is where replay keeps snapshots"
                )
            if self.config.learns(agent) and replay_of(self.config, specs, agent) == self.number:
                self.desks[agent] = self._open_desk(agent, spec)
        buffers = {agent: desk.buffer for agent, desk in self.desks.items()}
        self.snapshots = SnapshotDesk(self.directory, self.number, buffers, self.loop.wake)
        self._open_links()
        self.loop.every(TICK_S, self.tick)
        self._syncs = self.loop.every(self.config.replay.sync_s, self._sync)

    def _open_desk(self, agent: str, spec: AgentSpec) -> AgentDesk:
        desk = AgentDesk(self._open_buffer(agent, spec), TrayTable(self.config.limits.max_message_bytes))
        if self.config.parallel.mode == "lockstep":
            desk.rounds = in_rounds(desk.buffer, self.config)
            desk.rounds.load(self.directory / agent)
        return desk

    def _open_buffer(self, agent: str, spec: AgentSpec) -> AgentBuffer:
        started = time.monotonic()
        buffer = open_buffer(self.directory / agent, agent, spec, self.config)
        log.info(
            "buffer open",
            agent=agent,
            steps=buffer.drawable_steps,
            took_s=round(time.monotonic() - started, 3),
        )
        return buffer

    def _open_links(self) -> None:
        endpoints = self.config.endpoints.replay[self.number]
        run = self.params.run
        handlers: dict[str, OnIncoming] = {
            "stream_report": self.on_stream_report,
            "sample_request": self.on_sample_request,
            "priority_update": self.on_priority_update,
            "phase_request": self.on_phase_request,
            "replay_stats_request": self.on_replay_stats_request,
            "snapshot_order": self.snapshots.on_snapshot_order,
            "ledger_request": self.on_ledger_request,
        }
        self.requests = RequestReceiver(
            self.network,
            endpoints.requests,
            handlers,
            name="replay",
            send_buffer_bytes=self.config.limits.send_buffer_bytes,
        )
        self.requests.run = run
        self.snapshots.requests = self.requests
        self.segments = SegmentReceiver(self.network, endpoints.segments, self.on_segment, run=run)

    @property
    def _known_path(self) -> Path:
        return self.directory / f"service-{self.number}.json"

    def _read_known(self) -> tuple[str, dict[str, AgentSpec]] | None:
        try:
            known = json.loads(self._known_path.read_text())
            return known["run"], _SPECS.validate_python(known["specs"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning(
                "what replay knew of its run is unreadable; asking the parameter server", reason=str(error)
            )
            return None

    def _write_known(self, run: str, specs: dict[str, AgentSpec]) -> None:
        temporary = self._known_path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"run": run, "specs": _SPECS.dump_python(specs, mode="json")}))
        temporary.replace(self._known_path)

    # --- the loop ---------------------------------------------------------------------------------------

    def work(self) -> bool:
        """After each turn: batches that can be served now, then acknowledgements of what was stored."""
        more = False
        for agent, desk in self.desks.items():
            if desk.rounds is not None:
                self._advance_rounds(agent, desk, desk.rounds)
            if desk.held:
                more |= self._serve(agent, desk)
        more |= self._acknowledge()
        return self.snapshots.advance() or more

    def ends_with(self, state: RunState) -> bool:
        """Never: it answers for its ledger until it is told to end."""
        return False

    def tick(self) -> None:
        """What depends on time: deadlines of held requests, learners that fell silent."""
        now = time.monotonic()
        for agent, desk in self.desks.items():
            for held in [held for held in desk.held.values() if held.until <= now]:
                del desk.held[held.key]
                reason = desk.reason(held.message.batch_size) or f"the run is {self.state}"
                self.requests.refuse(
                    held.peer, held.message, Refused("deadline", f"no batch in time: {reason}")
                )
            for waiting in [waiting for waiting in desk.phases if waiting.until <= now]:
                desk.phases.remove(waiting)
                reason = f"round {waiting.message.round} is not stored: {desk.reason()}"
                self.requests.refuse(waiting.peer, waiting.message, Refused("deadline", reason))
            if desk.withheld and not self._holds_back(agent, desk, now):
                self._release_withheld(agent, desk)
            self._note_blocked(desk, now)
        self.gap_told = {key: told for key, told in self.gap_told.items() if now - told < GAP_PAUSE_S}
        self.snapshots.expire_orders(now)

    # --- segments ---------------------------------------------------------------------------------------

    def on_segment(self, segment: SegmentHead, block: Block) -> None:
        desk = self.desks.get(segment.agent)
        if desk is None:
            raise BadMessage(f"a segment of agent {segment.agent!r}; kept here are {', '.join(self.desks)}")
        insert = desk.buffer.insert if desk.rounds is None else desk.rounds.offer
        verdict = insert(segment, block)
        if verdict == "gap":
            self._tell_gap(segment.incarnation, segment.agent, desk)
        else:
            self.dirty.setdefault(segment.incarnation, set()).add(segment.agent)

    def _tell_gap(self, incarnation: str, agent: str, desk: AgentDesk) -> None:
        now = time.monotonic()
        if now - self.gap_told.get((incarnation, agent), -1e9) < GAP_PAUSE_S:
            return
        self.gap_told[incarnation, agent] = now
        mark = self._mark(incarnation, agent, desk).model_copy(update={"gap": True})
        self.requests.reply(incarnation.encode(), StreamMarks(incarnation=incarnation, marks={agent: mark}))

    def _acknowledge(self) -> bool:
        """For all actors whose streams moved; True when that is put off because segments keep coming."""
        pressed, self.segments.pressed = self.segments.pressed, False
        if not self.dirty:
            return False
        if pressed and time.monotonic() - self._acknowledged_at < ACKNOWLEDGE_S:
            return True
        self._acknowledge_all()
        return False

    def _acknowledge_all(self) -> None:
        """One message for each actor; its socket's identity is its incarnation."""
        dirty, self.dirty = self.dirty, {}
        for incarnation, agents in dirty.items():
            self.requests.reply(incarnation.encode(), self._marks(incarnation, agents))
        self._acknowledged_at = time.monotonic()

    def _marks(self, incarnation: str, agents: set[str], request: int = 0) -> StreamMarks:
        now = time.monotonic()
        marks, reasons = {}, []
        for agent in agents:
            desk = self.desks[agent]
            if self._holds_back(agent, desk, now):
                desk.withheld.add(incarnation)
                reasons.append(f"{agent}: {desk.buffer.limiter.reason()}")
            else:
                self.acknowledged[incarnation, agent] = desk.buffer.mark(incarnation)
            marks[agent] = self._mark(incarnation, agent, desk)
        return StreamMarks(
            request=request, incarnation=incarnation, marks=marks, waiting_for="; ".join(reasons)[:2_000]
        )

    def _mark(self, incarnation: str, agent: str, desk: AgentDesk) -> Mark:
        acknowledged = self.acknowledged.get((incarnation, agent), 0)
        held = desk.rounds.held(incarnation) if desk.rounds is not None else 0
        return Mark(stored=desk.buffer.mark(incarnation), acknowledged=acknowledged, held=held)

    def _holds_back(self, agent: str, desk: AgentDesk, now: float) -> bool:
        """Whether the limiter may make actors wait: only while somebody is there to draw."""
        return (
            desk.rounds is None  # there the schedule takes the limiter's place
            and desk.buffer.limiter.inserts_ahead()
            and self.state in ("running", "paused")
            and self._learner_lives(agent, desk, now)
        )

    def _learner_lives(self, agent: str, desk: AgentDesk, now: float) -> bool:
        lease = self.leases.learners.get(agent) if self.leases else None
        if lease is not None and not lease.live:
            return False
        if self.state == "paused":
            return True
        return now - desk.learner_heard < self.config.param_server.lease_s

    def _release_withheld(self, agent: str, desk: AgentDesk) -> None:
        for incarnation in desk.withheld:
            self.dirty.setdefault(incarnation, set()).add(agent)
        desk.withheld.clear()

    def on_stream_report(self, message: StreamReport, incoming: Incoming) -> None:
        now = time.monotonic()
        for agent, produced in message.produced_steps.items():
            if agent not in self.desks:
                raise Refused(
                    "wrong_replay", f"agent {agent!r} is not kept here; kept are {', '.join(self.desks)}"
                )
            self.desks[agent].buffer.report(message.incarnation, produced, message.final, now)
        marks = self._marks(message.incarnation, set(message.produced_steps), message.request)
        self.requests.reply(incoming.peer, marks)

    # --- rounds -----------------------------------------------------------------------------------------

    def on_phase_request(self, message: PhaseRequest, incoming: Incoming) -> None:
        desk = self._desk_of(message.token, incoming.peer)
        if desk.rounds is None:
            raise Refused("not_in_rounds", "this run is not in rounds (parallel.async_learning is true)")
        desk.phases = [held for held in desk.phases if held.message.request != message.request]
        desk.phases.append(HeldPhase(incoming.peer, message, time.monotonic() + 0.9 * message.deadline_s))

    def _advance_rounds(self, agent: str, desk: AgentDesk, rounds: RoundBuffer) -> None:
        """Stores what is due, and tells the learner how often it may draw from it."""
        for incarnation in rounds.advance():
            self.dirty.setdefault(incarnation, set()).add(agent)
        waiting, desk.phases = desk.phases, []
        for held in waiting:
            try:
                draws = rounds.due_after(held.message.round)
            except Refused as error:
                self.requests.refuse(held.peer, held.message, error)
                continue
            if draws is None:
                desk.phases.append(held)
                continue
            grant = PhaseGrant(request=held.message.request, round=held.message.round, draws=draws)
            self.requests.reply(held.peer, grant)

    # --- batches ----------------------------------------------------------------------------------------

    def on_sample_request(self, message: SampleRequest, incoming: Incoming) -> None:
        desk = self._desk_of(message.token, incoming.peer)
        key = message.token.number, message.draw
        if key in desk.held:
            return  # the learner repeats itself
        if incoming.received.arrays and key not in desk.served:
            desk.buffer.update_priorities(*self._update_in(incoming, desk.rounds is None))
        desk.held[key] = HeldSample(
            incoming.peer, message, key, desk.learner_heard + 0.9 * message.deadline_s
        )

    def _serve(self, agent: str, desk: AgentDesk) -> bool:
        """Serves what the limiter allows; True when it stopped for fairness alone."""
        for _ in range(BATCHES_A_TURN):
            if not desk.held or self.held or self.state in ("paused", "finished"):
                return False
            key, sample = next(iter(desk.held.items()))
            repeated = key in desk.served
            if not repeated and not self._can_serve(desk, sample.message):
                return False
            del desk.held[key]
            self._serve_one(desk, sample, repeated)
            if desk.withheld and not desk.buffer.limiter.inserts_ahead():
                self._release_withheld(agent, desk)
        return bool(desk.held)

    def _can_serve(self, desk: AgentDesk, message: SampleRequest) -> bool:
        if desk.rounds is not None:
            return desk.rounds.can_draw(message.draw)
        return desk.buffer.limiter.can_sample(message.batch_size)

    def _serve_one(self, desk: AgentDesk, sample: HeldSample, repeated: bool) -> None:
        message, (tray, no_tray) = sample.message, self._tray_of(desk, sample.message)
        draw, batch_size, beta = message.draw, message.batch_size, message.beta
        try:
            desk.buffer.check_token(message.token.number)  # a newer learner may have come while it was held
            if desk.rounds is not None:
                arrays = desk.rounds.draw(draw, batch_size, beta)
            else:
                arrays = desk.buffer.draw(draw, batch_size, beta, count=not repeated, tray=tray)
        except Refused as error:
            self.requests.refuse(sample.peer, message, error)
            return
        desk.remember(sample.key)
        self.counters["batches"] += 1
        on_tray = arrays.layout.text if arrays.block is tray else ""
        batch = Batch(
            request=message.request, token=message.token, draw=draw, on_tray=on_tray, no_tray=no_tray
        )
        self.requests.reply(sample.peer, batch, None if on_tray else arrays)

    def _tray_of(self, desk: AgentDesk, message: SampleRequest) -> tuple[Block | None, str]:
        """The learner's memory for this batch, or why there is none, where it lent some."""
        if message.tray is None or desk.rounds is not None:
            return None, ""
        try:
            return desk.trays.open(message.tray), ""
        except NoTray as error:
            return None, str(error)

    def on_priority_update(self, message: PriorityUpdate, incoming: Incoming) -> None:
        desk = self._desk_of(message.token, incoming.peer)
        update = self._update_in(incoming)
        if desk.rounds is not None:
            desk.rounds.take_update(message.draw, *update)
        elif len(update[0]):
            desk.buffer.update_priorities(*update)

    def _update_in(self, incoming: Incoming, welcome: bool = True) -> list[Array]:
        """Index, generation and priority of an update, or of one that rides on a request for a batch."""
        arrays = incoming.received.arrays
        if not welcome or (arrays and set(arrays) != {"index", "generation", "priority"}):
            raise BadMessage(f"a {incoming.message.kind} with arrays {sorted(arrays)}")  # type: ignore[attr-defined]
        return [arrays.get(name, _NO_ROWS[name]) for name in ("index", "generation", "priority")]

    def _desk_of(self, token: Token, peer: bytes) -> AgentDesk:
        """The agent's desk, for the learner that holds its newest lease and nobody else."""
        desk = self.desks.get(token.agent)
        if desk is None:
            raise Refused(
                "wrong_replay", f"agent {token.agent!r} is not kept here; kept are {', '.join(self.desks)}"
            )
        lease = self.leases.learners.get(token.agent) if self.leases else None
        if lease is not None and token.number == lease.number and peer != lease.incarnation.encode():
            raise Refused("wrong_agent", f"the lease of {token.agent!r} is held by another learner than you")
        if lease is not None and token.number > lease.number + GRANTS_AHEAD:
            raise Refused("unknown_token", f"token {token.number} of {token.agent!r} was never granted")
        desk.buffer.check_token(token.number, keep=lease is not None)
        desk.learner_heard = time.monotonic()
        if desk.absent:
            desk.absent = False
            desk.buffer.forgive()
        return desk

    def on_run_notice(self, notice: RunNotice) -> None:
        if notice.state == "draining" and (self.leases is None or self.leases.state != "draining"):
            self._sync()  # while the others wind down: at the end little is left to write
        self.leases = notice
        now = time.monotonic()
        for agent, desk in self.desks.items():
            if not self._learner_lives(agent, desk, now):
                desk.absent = True
                desk.trays.clear()
            lease = notice.learners.get(agent)
            if lease is not None and lease.number:
                desk.buffer.note_token(lease.number)

    # --- figures ----------------------------------------------------------------------------------------

    def _note_blocked(self, desk: AgentDesk, now: float) -> None:
        blocked = "inserts" if desk.withheld else "samples" if desk.held else ""
        if blocked != desk.blocked:
            desk.blocked, desk.blocked_since = blocked, now

    def on_replay_stats_request(self, message: ReplayStatsRequest, incoming: Incoming) -> None:
        now = time.monotonic()
        buffers = {agent: self._buffer_stats(desk, now) for agent, desk in self.desks.items()}
        counters = self.counters + self.requests.counters + self.segments.counters
        for desk in self.desks.values():
            counters.update(desk.buffer.counters())
        stats = ReplayStats(
            request=message.request,
            buffers=buffers,
            counters=dict(counters),
            newest_snapshot=self.snapshots.newest(),
        )
        self.requests.reply(incoming.peer, stats)

    def _buffer_stats(self, desk: AgentDesk, now: float) -> BufferStats:
        self._note_blocked(desk, now)
        limiter = LimiterStats(
            blocked=desk.blocked,
            reason=desk.reason(desk.batch_size) if desk.blocked else "",
            since_s=now - desk.blocked_since if desk.blocked else 0.0,
            samples_per_insert=desk.buffer.limiter.samples_per_insert,
            min_steps=desk.buffer.limiter.min_steps,
            tolerance_samples=desk.buffer.limiter.tolerance_samples,
            ahead_samples=desk.buffer.limiter.ahead,
        )
        return BufferStats(held_requests=len(desk.held), limiter=limiter, **desk.buffer.stats())

    def on_ledger_request(self, message: LedgerRequest, incoming: Incoming) -> None:
        now, lease_s = time.monotonic(), self.config.param_server.lease_s
        total: Counter[str] = Counter()
        produced_by: Counter[str] = Counter()
        for desk in self.desks.values():
            total.update(desk.buffer.ledger(now, lease_s, message.closing))
            produced_by.update(desk.buffer.produced_by())
        counts = (name for name, field in Ledger.model_fields.items() if field.is_required())
        fields = {name: total[name] for name in counts}  # all 0 if no agent is kept here
        ledger = Ledger(request=message.request, produced_by=dict(produced_by), **fields)
        self.requests.reply(incoming.peer, ledger)

    def metrics(self) -> dict[str, float]:
        if not self.ready:
            return {}
        inserted = sum(desk.buffer.inserted_steps for desk in self.desks.values())
        sampled = sum(desk.buffer.sampled_steps for desk in self.desks.values())
        now, (since, inserted_before, sampled_before) = time.monotonic(), self._rates
        elapsed_s = max(now - since, 1e-6)
        self._rates = (now, inserted, sampled)
        figures = {
            "inserts_per_s": (inserted - inserted_before) / elapsed_s,
            "samples_per_s": (sampled - sampled_before) / elapsed_s,
            "bad_segments": float(self.segments.counters["bad_segments"]),
        }
        for agent, desk in self.desks.items():
            figures[f"fill.{agent}"] = desk.buffer.drawable_steps / desk.buffer.capacity_steps
            figures[f"steps.{agent}"] = float(desk.buffer.drawable_steps)
            figures[f"held.{agent}"] = float(len(desk.held))
            figures[f"withheld.{agent}"] = float(len(desk.withheld))
            if desk.rounds is not None:
                figures[f"rounds.{agent}"] = float(desk.rounds.rounds)
        return figures

    def set_values(self, values: dict[str, float]) -> None:
        """The limiter's `samples_per_insert` and `min_steps`, of all agents here."""
        if self.config.parallel.mode == "lockstep":
            raise Refused(
                "not_in_lockstep",
                "in lockstep how often a step is drawn is part of what is repeated bit for bit and cannot "
                "change in the middle; train in mode async to change it",
            )
        check_limiter_values(values, self.config.replay.capacity_steps)
        ratio = values.get("samples_per_insert")
        for agent, desk in self.desks.items():
            desk.buffer.adjust_limiter(
                samples_per_insert=ratio,
                tolerance_samples=None if ratio is None else tolerance_samples(self.config, agent, ratio),
                min_steps=int(values["min_steps"]) if "min_steps" in values else None,
            )
            if desk.withheld and not desk.buffer.limiter.inserts_ahead():
                self._release_withheld(agent, desk)
        log.info("limiter set", **values)

    # --- disk -------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Puts the files on the disk in a thread: a slow disk must not hold up a batch."""
        if self.syncing is not None:
            if not self.syncing.done():
                return
            self.syncing.result()  # a disk that cannot be written ends the service, loudly
        self.syncing = self.syncer.submit(self._sync_buffers)

    def _sync_buffers(self) -> None:
        for desk in self.desks.values():
            desk.buffer.sync()

    def wind_down(self) -> None:
        self._acknowledge_all()
        self.snapshots.end()
        self._syncs.cancel()  # the loop still turns for the last words
        self.syncer.shutdown()
        self._sync_buffers()
        for agent, desk in self.desks.items():
            if desk.rounds is not None and desk.rounds.at_boundary:
                desk.rounds.save(self.directory / agent)

    def close(self) -> None:
        super().close()
        if self.lock is not None:
            os.close(self.lock)


def check_limiter_values(values: dict[str, float], capacity_steps: int) -> None:
    """Refuses settings that do not exist or could never work, in words."""
    known = ("samples_per_insert", "min_steps")
    if unknown := sorted(set(values) - set(known)):
        raise Refused(
            "unknown_value", f"replay has no setting {', '.join(unknown)}; it has {' and '.join(known)}"
        )
    if not values:
        raise Refused("unknown_value", f"nothing to set; replay has {' and '.join(known)}")
    ratio = values.get("samples_per_insert", 1.0)
    if not (math.isfinite(ratio) and ratio > 0.0):
        raise Refused("bad_value", f"samples_per_insert {ratio:g}: it must be a number above 0")
    steps = values.get("min_steps", 1.0)
    if not (math.isfinite(steps) and steps == int(steps) and 1 <= steps <= capacity_steps):
        raise Refused(
            "bad_value",
            f"min_steps {steps:g}: it must be a whole number from 1 to replay.capacity_steps "
            f"({capacity_steps}); with more nothing could ever be drawn",
        )
