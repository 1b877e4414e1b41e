"""The replay service: takes segments in on a PULL, serves batches on a ROUTER, never stops reading either.

One AgentBuffer for each of its agents. A sample request is held until it can be served or its deadline
passes. A segment is acknowledged after its commit; while the limiter says that inserts run ahead,
acknowledgements are withheld, which makes actors wait once their windows are full. Without a live learner
nothing is withheld.

Next: services/replay/ring.py
"""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from services.replay import snapshot_files
from services.replay.acknowledgements import Acknowledgements
from services.replay.buffer import AgentBuffer
from services.replay.desk import AgentDesk, HeldPhase, HeldSample, never_granted, not_the_holder
from services.replay.known_run import read_known_run, write_known_run
from services.replay.limiter import check_limiter_values
from services.replay.opening import in_rounds, open_buffer
from services.replay.rounds import RoundBuffer
from services.replay.snapshot_desk import SnapshotDesk
from shared.config import Config
from shared.errors import BadMessage, ConfigError, Refused
from shared.layout import Block
from shared.links.requests import Incoming, OnIncoming, RequestReceiver
from shared.links.segments import SegmentReceiver
from shared.links.trays import TrayTable
from shared.logs import get_logger
from shared.messages import (
    Ledger,
    LedgerRequest,
    PhaseGrant,
    PhaseRequest,
    PriorityUpdate,
    ReplayStats,
    ReplayStatsRequest,
    RunNotice,
    RunState,
    SampleRequest,
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
BATCHES_A_TURN = 8  # for one agent, before segments get their turn
GRANTS_AHEAD = 8  # a token may come before the notice of its grant, but not many grants before


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
        self.acknowledgements = Acknowledgements(self.desks, self._holds_back)
        self.leases: RunNotice | None = None
        self.counters: Counter[str] = Counter()
        self.syncer = ThreadPoolExecutor(1, "sync")
        self.syncing: Future[None] | None = None
        self._rates = (time.monotonic(), 0, 0)
        self._ticked = False  # since `work`: what cannot be served then is looked at for its deadline

    # --- start ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A restarted replay knows its run and its agents from its own files and waits for nobody."""
        self.lock = own(self.directory / f"service-{self.number}.lock")
        known_path = self.directory / f"service-{self.number}.json"
        known = read_known_run(known_path)
        if known is None:
            self.join()
            specs = self.get_specs()
            write_known_run(known_path, self.params.run, specs)
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
        if self.leases is not None:  # a notice that came before there were desks
            self._note_leases(self.leases)
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
        self.snapshots.requests = self.acknowledgements.requests = self.requests
        self.segments = SegmentReceiver(self.network, endpoints.segments, self.on_segment, run=run)

    # --- the loop ---------------------------------------------------------------------------------------

    def work(self) -> bool:
        """After each turn: batches that can be served now, then acknowledgements of what was stored."""
        more = False
        for agent, desk in self.desks.items():
            if desk.rounds is not None:
                self._advance_rounds(agent, desk, desk.rounds)
            if desk.held:
                more |= self._serve(agent, desk)
        if self._ticked:
            self._ticked = False
            # Who would be overdue at the next tick is told now: late answers help nobody.
            for desk in self.desks.values():
                self._refuse_overdue(desk, time.monotonic() + TICK_S)
        pressed, self.segments.pressed = self.segments.pressed, False
        more |= self.acknowledgements.advance(pressed)
        return self.snapshots.advance() or more

    def ends_with(self, state: RunState) -> bool:
        """Never: it answers for its ledger until it is told to end."""
        return False

    def tick(self) -> None:
        """What depends on time: deadlines of held requests, learners that fell silent."""
        now = time.monotonic()
        for agent, desk in self.desks.items():
            if desk.withheld and not self._holds_back(agent, desk, now):
                self.acknowledgements.release(agent)
            desk.note_blocked(now)
        self.acknowledgements.forget_gaps(now)
        self.snapshots.expire_orders(now + TICK_S)
        self._ticked = True

    def _refuse_overdue(self, desk: AgentDesk, now: float) -> None:
        """Answers whose deadline has passed with what they waited for."""
        for held in desk.take_overdue(now):
            if not desk.proven(held.message.token):
                reason = f"token {held.message.token.number} was not granted to anybody"
            elif isinstance(held, HeldPhase):
                reason = f"round {held.message.round} is not stored: {desk.reason()}"
            else:
                why = desk.reason(held.message.batch_size) or f"the run is {self.state}"
                reason = f"no batch in time: {why}"
            self.requests.refuse(held.peer, held.message, Refused("deadline", reason))

    # --- segments ---------------------------------------------------------------------------------------

    def on_segment(self, segment: SegmentHead, block: Block) -> None:
        desk = self.desks.get(segment.agent)
        if desk is None:
            raise BadMessage(f"a segment of agent {segment.agent!r}; kept here are {', '.join(self.desks)}")
        insert = desk.buffer.insert if desk.rounds is None else desk.rounds.offer
        verdict = insert(segment, block)
        if verdict == "gap":
            self.acknowledgements.tell_gap(segment.incarnation, segment.agent)
        else:
            self.acknowledgements.note(segment.incarnation, segment.agent)

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

    def on_stream_report(self, message: StreamReport, incoming: Incoming) -> None:
        incoming.check_sender(message.incarnation)
        for agent in message.produced_steps:
            self._kept(agent)  # all or nothing
        now = time.monotonic()
        for agent, produced in message.produced_steps.items():
            self.desks[agent].buffer.report(message.incarnation, produced, message.final, now)
        marks = self.acknowledgements.marks(message.incarnation, set(message.produced_steps), message.request)
        self.requests.reply(incoming.peer, marks)

    # --- rounds -----------------------------------------------------------------------------------------

    def on_phase_request(self, message: PhaseRequest, incoming: Incoming) -> None:
        desk = self._desk_of(message.token, incoming.peer, may_wait=True)
        if desk.rounds is None:
            raise Refused("not_in_rounds", "this run is not in rounds (parallel.async_learning is true)")
        desk.hold_phase(incoming.peer, message)

    def _advance_rounds(self, agent: str, desk: AgentDesk, rounds: RoundBuffer) -> None:
        """Stores what is due, and tells the learner how often it may draw from it."""
        for incarnation in rounds.advance():
            self.acknowledgements.note(incarnation, agent)
        waiting, desk.phases = desk.phases, []
        for held in waiting:
            try:
                draws = rounds.due_after(held.message.round) if desk.proven(held.message.token) else None
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
        # Priorities are of batches that were drawn, so their token must be known by now.
        desk = self._desk_of(message.token, incoming.peer, may_wait=not incoming.received.arrays)
        desk.hold_sample(incoming.peer, incoming.received, message)

    def _serve(self, agent: str, desk: AgentDesk) -> bool:
        """Serves what the limiter allows; True when it stopped for fairness alone."""
        if self.held or self.state in ("paused", "finished"):
            return False
        for _ in range(BATCHES_A_TURN):
            sample = desk.next_sample()
            if sample is None:
                return False
            self._serve_one(desk, sample)
            if desk.withheld and not desk.buffer.limiter.inserts_ahead():
                self.acknowledgements.release(agent)
        return bool(desk.held)

    def _serve_one(self, desk: AgentDesk, sample: HeldSample) -> None:
        try:
            arrays, batch = desk.draw(sample)
        except Refused as error:
            self.requests.refuse(sample.peer, sample.message, error)
            return
        self.counters["batches"] += 1
        self.requests.reply(sample.peer, batch, None if batch.on_tray else arrays)

    def on_priority_update(self, message: PriorityUpdate, incoming: Incoming) -> None:
        self._desk_of(message.token, incoming.peer).take_update(incoming.received, message)

    def _desk_of(self, token: Token, peer: bytes, *, may_wait: bool = False) -> AgentDesk:
        """The agent's desk, for the learner that holds its newest lease and nobody else.

        `may_wait`: the request is held anyway, so it may be faster than the notice that proves its token.
        """
        desk = self._kept(token.agent)
        if desk.proven(token):
            lease = self.leases.learners.get(token.agent) if self.leases else None
            if lease is not None and token.number == lease.number and peer != lease.incarnation.encode():
                raise not_the_holder(token.agent)
            desk.buffer.check_token(token.number)
            desk.hear_learner()
        elif not may_wait or token.number > desk.granted + GRANTS_AHEAD:
            raise never_granted(token)
        return desk

    def _kept(self, agent: str) -> AgentDesk:
        desk = self.desks.get(agent)
        if desk is None:
            kept = ", ".join(self.desks)
            raise Refused("wrong_replay", f"agent {agent!r} is not kept here; kept are {kept}")
        return desk

    def on_run_notice(self, notice: RunNotice) -> None:
        if notice.state == "draining" and (self.leases is None or self.leases.state != "draining"):
            self._sync()  # while the others wind down: at the end little is left to write
        self.leases = notice
        self._note_leases(notice)

    def _note_leases(self, notice: RunNotice) -> None:
        now = time.monotonic()
        for agent, desk in self.desks.items():
            if not self._learner_lives(agent, desk, now):
                desk.absent = True
                desk.trays.clear()
            lease = notice.learners.get(agent)
            number, holder = (lease.number, lease.incarnation) if lease is not None else (0, "")
            for held, error in desk.note_lease(number, holder.encode()):
                self.requests.refuse(held.peer, held.message, error)

    # --- figures ----------------------------------------------------------------------------------------

    def on_replay_stats_request(self, message: ReplayStatsRequest, incoming: Incoming) -> None:
        now = time.monotonic()
        buffers = {agent: desk.stats(now) for agent, desk in self.desks.items()}
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
            figures |= {f"{name}.{agent}": value for name, value in desk.metrics().items()}
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
        for agent, desk in self.desks.items():
            desk.adjust_limiter(values, self.config)
            if desk.withheld and not desk.buffer.limiter.inserts_ahead():
                self.acknowledgements.release(agent)
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
        self.acknowledgements.send()
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
