"""The parameter server: versions of weights, leases, specs, checkpoints, progress, and the run's state.

It owns `params/` and `checkpoints/` and is the only one to write there. Everything is on disk before it is
confirmed, so it may be killed at any moment: those who did not hear back ask again. It answers on a ROUTER
and tells everyone on a PUB. Requests that cannot be answered yet (specs, leases) are held until they can.

Next: shared/links/broadcast.py, and back to services/actor/service.py
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.param_server.broadcasts import Broadcast, BroadcastEncoder
from services.param_server.checkpoints import CheckpointStore
from services.param_server.leases import LeaseBook
from services.param_server.permits import Permits
from services.param_server.progress import Progress
from services.param_server.roster import Roster
from services.param_server.rounds import RoundGate
from services.param_server.run_config import keep_config
from services.param_server.run_state import RunBook
from services.param_server.spec_book import SpecBook
from services.param_server.versions import VersionStore
from shared.config import Config
from shared.errors import Refused
from shared.health_socket import Health, open_health_socket
from shared.links.broadcast import NOTICES, STATUS, Broadcaster, weights_topic
from shared.links.network import Network
from shared.links.requests import Incoming, OnIncoming, RequestReceiver
from shared.logs import get_logger
from shared.loop import Loop
from shared.messages import (
    AgentStatus,
    CheckpointChunk,
    CheckpointPiece,
    CheckpointRequest,
    ControlReply,
    ControlRequest,
    Done,
    ErrorReply,
    FailureReport,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LearnerLease,
    LeaseGrant,
    LeaseRequest,
    PermitRequest,
    PermitReturn,
    Produced,
    ProducedRequest,
    Publish,
    Published,
    Release,
    Request,
    RoundGrant,
    RoundRequest,
    RunNotice,
    RunStatus,
    ServiceStatus,
    SnapshotRequest,
    SpecRegistration,
    SpecRequest,
    Specs,
    StatusRequest,
    Token,
    Weights,
    Welcome,
)
from shared.ownership import own
from shared.schedule import Schedule

log = get_logger()

TICK_S = 0.25
NOTICE_S = 1.0
MOST_PIECE_BYTES = 4 << 20
HOLD_SHARE = 0.8  # of its deadline a request is held, so that the answer arrives before the asker gives up


@dataclass(slots=True)
class Held:
    """A request that cannot be answered yet."""

    incoming: Incoming
    message: Request
    until: float


class ParamServer:
    """One process, one thread, one loop."""

    def __init__(self, config: Config, run_dir: Path, instance: str) -> None:
        self.config, self.instance = config, instance
        self.started = time.monotonic()
        settings = config.param_server
        params = run_dir / "params"
        self.lock = own(params / "service.lock")
        keep_config(run_dir, config)
        self.run_book = RunBook(
            params / "run.json",
            minutes=config.run.minutes,
            agent_steps=None if config.parallel.mode == "lockstep" else config.run.agent_steps,
            now=self.started,
        )
        # In lockstep a run ends between two rounds: the gate knows when.
        self.gate = RoundGate(Schedule.of(config)) if config.parallel.mode == "lockstep" else None
        self.permits = Permits(config.parallel.training_at_once)
        self.spec_book = SpecBook(params / "specs.json")
        self.leases = LeaseBook(params / "leases.json", settings.lease_s, time.monotonic)
        self.progress = Progress(params / "progress.jsonl")
        self.versions = VersionStore(params / "agents", settings.keep_versions)
        self.checkpoints = CheckpointStore(run_dir / "checkpoints")
        self.encoder = BroadcastEncoder(
            delta=settings.delta, full_every=settings.full_every, broadcast_dtype=settings.broadcast_dtype
        )
        self.roster = Roster(settings.lease_s)
        self.held: list[Held] = []
        self.forwarded: dict[int, tuple[bytes, int]] = {}
        self.forwards = 0
        self.draining_since = self.started
        self.counters: Counter[str] = Counter()
        self.loop = Loop()
        self.loop.stop_on_signals()
        self.network = Network.of(config, self.loop)
        self._open_links()
        health_socket = config.run.health_socket
        self.health_socket = open_health_socket(self.loop, health_socket, self.health)

    def _open_links(self) -> None:
        endpoints, run = self.config.endpoints, self.run_book.run_id
        handlers: dict[str, OnIncoming] = {
            "hello": self.on_hello,
            "spec_registration": self.on_spec_registration,
            "spec_request": self.on_spec_request,
            "lease_request": self.on_lease_request,
            "round_request": self.on_held_request,
            "permit_request": self.on_permit_request,
            "permit_return": self.on_permit_return,
            "heartbeat": self.on_heartbeat,
            "release": self.on_release,
            "failure_report": self.on_failure_report,
            "produced_request": self.on_produced_request,
            "publish": self.on_publish,
            "snapshot_request": self.on_snapshot_request,
            "checkpoint_chunk": self.on_checkpoint_chunk,
            "checkpoint_request": self.on_checkpoint_request,
            "control_request": self.on_control_request,
            "control_reply": self.on_control_reply,
            "error_reply": self.on_control_reply,
            "status_request": self.on_status_request,
        }
        self.broadcaster = Broadcaster(self.network, endpoints.broadcast, run=run)
        self.requests = RequestReceiver(self.network, endpoints.params, handlers, name="param_server")
        self.requests.run = run

    def run(self) -> None:
        """Serves until a signal asks it to end."""
        log.info("ready", run=self.run_book.run_id, state=self.run_book.state)
        self.loop.every(TICK_S, self.tick)
        self.loop.every(NOTICE_S, self.announce)
        try:
            while not self.loop.stopping:
                self.loop.turn(block=True)
            log.info("ending", reason=self.loop.stop_reason)
        finally:
            self.close()

    def health(self) -> Health:
        """How it is, for whoever runs its container: it is ready as long as it answers."""
        return Health(True, f"ready; the run is {self.run_book.state}")

    def close(self) -> None:
        if self.health_socket is not None:
            self.health_socket.close()
        self.requests.close()
        self.broadcaster.close()
        self.progress.close()
        os.close(self.lock)
        self.network.close()
        self.loop.close()

    # --- the run ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """What depends on time. A disk that cannot be written is counted; the next tick tries again."""
        try:
            self._tick(time.monotonic())
        except Refused as error:
            self.counters[f"failed.{error.code}"] += 1
            log.warning("cannot go on for the moment", code=error.code, reason=str(error))

    def _tick(self, now: float) -> None:
        """Leases, limits, the end of draining, held requests."""
        self.run_book.tick(now)
        for lease in self.leases.expire(now):
            log.warning("lease lapsed", role=lease.role, name=lease.name, instance=lease.instance)
            if lease.role == "learner":
                self.permits.give_back(lease.name)
        if self.run_book.state == "running":
            reason = self.run_book.limit_reached(now, self.progress.totals.agent_steps)
            if reason:
                self._end_run(now, reason)
            if self.gate is not None and self.gate.is_over(self._learning_versions()):
                self._drain(now)
        elif self.run_book.state == "draining":
            self._finish_when_drained(now)
        self._answer_held(now)
        self.roster.forget_silent(now)

    def _end_run(self, now: float, reason: str) -> None:
        """Begins to drain; in lockstep after the rounds that were begun."""
        if self.gate is None:
            log.info("ending the run", reason=reason)
            self._drain(now)
        elif self.gate.stop():
            log.info("ending the run after the rounds that were begun", reason=reason)
            if self.run_book.state == "paused":  # they must be played for that
                self.run_book.resume(now, self.progress.totals.agent_steps)

    def _drain(self, now: float) -> None:
        if self.run_book.drain(now):
            self.draining_since = now
            self.announce()

    def _finish_when_drained(self, now: float) -> None:
        overdue = now - self.draining_since > self.config.param_server.drain_s
        if not self.leases.live(now) or overdue:
            if overdue:
                log.warning("draining took too long; finishing without", live=len(self.leases.live(now)))
            self.run_book.finish(now)
            self.announce()

    def announce(self) -> None:
        """Tells everyone where the run stands."""
        totals, now = self.progress.totals, time.monotonic()
        notice = RunNotice(
            state=self.run_book.state,
            epochs=totals.epochs,
            agent_steps=totals.agent_steps,
            learners=self._learners(now),
            versions={agent: self._version(agent) for agent in self.versions.agents()},
        )
        self.broadcaster.send(NOTICES, notice)
        self.broadcaster.send(STATUS, self.status())

    def _learners(self, now: float) -> dict[str, LearnerLease]:
        return {
            agent: LearnerLease(
                number=lease.number, incarnation=lease.incarnation, live=self.leases.is_live(lease, now)
            )
            for agent, lease in self.leases.learners().items()
        }

    def _version(self, agent: str) -> int:
        newest = self.versions.newest(agent)
        return newest.version if newest else 0

    # --- joining ----------------------------------------------------------------------------------------

    def on_hello(self, message: Hello, incoming: Incoming) -> None:
        if message.run not in ("", self.run_book.run_id):
            raise Refused(
                "other_run", f"this is run {self.run_book.run_id}; you keep data of run {message.run}"
            )
        welcome = Welcome(
            request=message.request,
            run_id=self.run_book.run_id,
            state=self.run_book.state,
            lease_s=self.config.param_server.lease_s,
        )
        self.requests.reply(incoming.peer, welcome)

    def on_spec_registration(self, message: SpecRegistration, incoming: Incoming) -> None:
        if self.spec_book.register(message.specs):
            log.info("specs registered", agents=list(message.specs))
        self.requests.reply(incoming.peer, Specs(request=message.request, specs=self.spec_book.specs))
        self._answer_held(time.monotonic())

    def on_spec_request(self, message: SpecRequest, incoming: Incoming) -> None:
        if not self._answer_spec_request(message, incoming):
            self._hold(message, incoming)

    def _answer_spec_request(self, message: SpecRequest, incoming: Incoming) -> bool:
        if not self.spec_book.specs:
            return False
        self.requests.reply(incoming.peer, Specs(request=message.request, specs=self.spec_book.specs))
        return True

    def on_lease_request(self, message: LeaseRequest, incoming: Incoming) -> None:
        incoming.check_sender(message.incarnation)
        if not self._answer_lease_request(message, incoming):
            self._hold(message, incoming)

    def _answer_lease_request(self, message: LeaseRequest, incoming: Incoming) -> bool:
        now, lease_s = time.monotonic(), self.config.param_server.lease_s
        if message.role == "actor":
            index = self.leases.grant_actor(message.instance, message.incarnation, now)
            grant = LeaseGrant(request=message.request, index=index, lease_s=lease_s)
        else:
            token = self.leases.grant_learner(
                self._learning(message.agent), message.instance, message.incarnation, message.agent, now
            )
            if token is None:
                return False
            log.info("lease granted", agent=token.agent, number=token.number, instance=message.instance)
            grant = LeaseGrant(request=message.request, token=token, lease_s=lease_s)
        self.announce()  # first: replay serves the lease from the notice on
        if not self.requests.reply(incoming.peer, grant):  # it died while it waited: the next may have it
            self.leases.release(message.instance, message.incarnation)
            self.announce()
        return True

    def on_held_request(self, message: RoundRequest | PermitRequest, incoming: Incoming) -> None:
        """Answered now, or as soon as it can be."""
        if not self._answer(message, incoming):
            self._hold(message, incoming)

    def _answer_round_request(self, message: RoundRequest, incoming: Incoming) -> bool:
        if self.gate is None or message.index >= self.config.actor.count:
            raise Refused(
                "not_in_rounds",
                f"actor {message.index} cannot play rounds here: the run is {self.config.parallel.mode} "
                f"with actor.count = {self.config.actor.count}",
            )
        versions = self._learning_versions()
        if not versions or self.run_book.state != "running":
            return False
        number = self.gate.first_round(versions) if message.round is None else message.round
        if not self.gate.may_play(number, versions):
            return False
        wanted = Schedule.of(self.config).version_for(number)
        grant = RoundGrant(request=message.request, round=number, versions=dict.fromkeys(versions, wanted))
        self.requests.reply(incoming.peer, grant)
        return True

    def _learning_versions(self) -> dict[str, int]:
        """The newest version of every agent that learns; empty until the agents are known."""
        return {agent: self._version(agent) for agent in self._learning()}

    def on_permit_request(self, message: PermitRequest, incoming: Incoming) -> None:
        self._check_holder(message.token, incoming.peer)
        self.on_held_request(message, incoming)

    def _answer_permit_request(self, message: PermitRequest, incoming: Incoming) -> bool:
        if not self.permits.grant(message.token.agent):
            return False
        if not self.requests.reply(incoming.peer, Done(request=message.request)):
            self.permits.give_back(message.token.agent)  # it died while it waited
        return True

    def on_permit_return(self, message: PermitReturn, incoming: Incoming) -> None:
        self._check_holder(message.token, incoming.peer)
        self.permits.give_back(message.token.agent)
        self._answer_held(time.monotonic())

    def _learning(self, wanted: str | None = None) -> list[str]:
        """The agents that learn: those that a lease can be had for."""
        specs = self.spec_book.specs
        if wanted in specs and not self.config.learns(wanted):
            raise Refused(
                "unknown_agent", f"agent {wanted!r} is {self.config.algorithm_of(wanted)}: it has no learner"
            )
        return [agent for agent in specs if self.config.learns(agent)]

    def _answer(self, message: Request, incoming: Incoming) -> bool:
        if isinstance(message, SpecRequest):
            return self._answer_spec_request(message, incoming)
        if isinstance(message, RoundRequest):
            return self._answer_round_request(message, incoming)
        if isinstance(message, PermitRequest):
            return self._answer_permit_request(message, incoming)
        assert isinstance(message, LeaseRequest)
        return self._answer_lease_request(message, incoming)

    def _hold(self, message: Request, incoming: Incoming) -> None:
        same = (held for held in self.held if held.incoming.peer == incoming.peer)
        if any(held.message.request == message.request for held in same):
            return  # the asker repeats itself
        self.held.append(Held(incoming, message, time.monotonic() + HOLD_SHARE * message.deadline_s))

    def _answer_held(self, now: float) -> None:
        waiting, self.held = self.held, []
        for held in waiting:
            message, incoming = held.message, held.incoming
            try:
                if self._answer(message, incoming):
                    continue
            except Refused as error:
                self.requests.refuse(incoming.peer, message, error)
                continue
            if now < held.until:
                self.held.append(held)
            else:
                self.requests.refuse(incoming.peer, message, _why_not_yet(message))

    # --- heartbeats and leases --------------------------------------------------------------------------

    def on_heartbeat(self, message: Heartbeat, incoming: Incoming) -> None:
        incoming.check_sender(message.incarnation)  # else a stranger could count an actor's epochs
        now = time.monotonic()
        self.roster.note(message, incoming.peer, now)
        held = True
        if message.token is not None or message.index is not None:
            held = self.leases.renew(message.incarnation, message.token, message.index, now)
        taken = self.progress.last_taken(message.incarnation)
        if message.epochs is not None:
            taken = self.progress.take(
                message.incarnation, message.index or 0, message.epochs, self.run_book.elapsed_s(now)
            )
        reply = HeartbeatReply(
            request=message.request,
            state=self.run_book.state,
            lease_held=held,
            epoch_summary=taken,
            epochs=self.progress.totals.epochs,
            agent_steps=self.progress.totals.agent_steps,
        )
        self.requests.reply(incoming.peer, reply)

    def on_release(self, message: Release, incoming: Incoming) -> None:
        self._give_back(message.instance, message.incarnation)
        self.requests.reply(incoming.peer, Done(request=message.request))
        self._answer_held(time.monotonic())
        self.announce()

    def on_failure_report(self, message: FailureReport, incoming: Incoming) -> None:
        """Its launcher saw it end: its leases need not be waited for. The next incarnation keeps its own."""
        now = time.monotonic()
        log.warning("a service failed", failed=message.instance, reason=message.reason)
        incarnation = self.roster.note_failure(message.instance, message.pid, message.reason, now)
        if incarnation is not None:
            self._give_back(message.instance, incarnation)
        self.requests.reply(incoming.peer, Done(request=message.request))
        self._answer_held(now)
        self.announce()

    def _give_back(self, instance: str, incarnation: str | None) -> None:
        for lease in self.leases.release(instance, incarnation):
            log.info("lease released", role=lease.role, name=lease.name, instance=lease.instance)
            if lease.role == "learner":
                self.permits.give_back(lease.name)
        self.roster.remove(instance, incarnation)

    def on_produced_request(self, message: ProducedRequest, incoming: Incoming) -> None:
        self.requests.reply(incoming.peer, Produced(request=message.request, steps=self.progress.steps_by))

    # --- weights and checkpoints ------------------------------------------------------------------------

    def on_publish(self, message: Publish, incoming: Incoming) -> None:
        """To disk, then to everyone, then confirmed."""
        self._check_holder(message.token, incoming.peer)
        agent = message.token.agent
        version, is_new = self.versions.publish(
            agent,
            incoming.received.arrays,
            publish_id=message.publish_id,
            updates=message.updates,
            token=message.token.number,
        )
        newest = self.versions.newest(agent)
        assert newest is not None
        self.broadcaster.send(weights_topic(agent), *_as_message(self.encoder.encode(newest)))
        self.requests.reply(incoming.peer, Published(request=message.request, version=version))
        self.counters["published" if is_new else "published_again"] += 1
        if self.gate is not None:
            self._answer_held(time.monotonic())  # a round may wait for just this version

    def _check_holder(self, token: Token, peer: bytes) -> None:
        """The token must be the newest, and used by the process that it was given to."""
        self.leases.check(token)
        holder = self.leases.learners()[token.agent].incarnation
        if holder.encode() != peer:
            raise Refused("wrong_agent", f"the lease of {token.agent!r} is held by another learner than you")

    def on_snapshot_request(self, message: SnapshotRequest, incoming: Incoming) -> None:
        full = self.encoder.base(message.agent, message.version) if message.version else None
        if full is None:
            full = self.encoder.full(self.versions.load(message.agent, message.version))
        weights, tensors = _as_message(full)
        self.requests.reply(incoming.peer, weights.model_copy(update={"request": message.request}), tensors)

    def on_checkpoint_chunk(self, message: CheckpointChunk, incoming: Incoming) -> None:
        self._check_holder(message.token, incoming.peer)
        data = incoming.received.arrays.get("data")
        if data is None or data.dtype != np.uint8 or data.ndim != 1:
            raise Refused("bad_chunk", "a chunk carries one uint8[n] array named data")
        received, whole = self.checkpoints.add_chunk(
            message.token.agent,
            message.checkpoint_id,
            message.offset,
            message.total_bytes,
            message.checksum,
            data.data,
        )
        if not whole and received != message.offset + len(data):
            raise Refused("chunk_out_of_order", f"{received} bytes are here; start the checkpoint again")
        self.requests.reply(incoming.peer, Done(request=message.request))

    def on_checkpoint_request(self, message: CheckpointRequest, incoming: Incoming) -> None:
        self.leases.check(message.token)
        size = min(MOST_PIECE_BYTES, self.config.limits.max_message_bytes)
        piece = self.checkpoints.piece(message.token.agent, message.offset, size)
        checkpoint_id, total, checksum, data = piece or ("", 0, 0, b"")
        reply = CheckpointPiece(
            request=message.request,
            checkpoint_id=checkpoint_id,
            offset=message.offset,
            total_bytes=total,
            checksum=checksum,
        )
        self.requests.reply(incoming.peer, reply, {"data": np.frombuffer(data, np.uint8)})

    # --- control and status -----------------------------------------------------------------------------

    def on_control_request(self, message: ControlRequest, incoming: Incoming) -> None:
        if message.target:
            self._forward(message, incoming)
            return
        now = time.monotonic()
        if message.action == "pause":
            self.run_book.pause(now)
        elif message.action == "resume":
            self._resume(now)
        elif message.action == "drain":
            self._end_run(now, "asked to")
        elif message.action == "stop":
            self.loop.stop("asked to")
        elif message.action == "set":
            raise Refused("unknown_value", "nothing can be set on the parameter server")
        self.announce()
        reply = ControlReply(
            request=message.request,
            service="param_server",
            instance=self.instance,
            state=self.run_book.state,
            ready=True,
        )
        self.requests.reply(incoming.peer, reply)

    def _resume(self, now: float) -> None:
        over = self.gate is not None and self.gate.is_over(self._learning_versions())
        if over and self.run_book.state in ("draining", "finished"):
            raise Refused("limit_reached", "it cannot resume: run.agent_steps were played; raise it first")
        self.run_book.resume(now, self.progress.totals.agent_steps)

    def _forward(self, message: ControlRequest, incoming: Incoming) -> None:
        """To the instance that is asked for; its answer comes back through on_control_reply."""
        target = self.roster.find(message.target)
        if target is None:
            known = ", ".join(self.roster.instances)
            raise Refused("unknown_instance", f"no instance {message.target!r}; known are {known}")
        self.forwards += 1
        self.forwarded[self.forwards] = (incoming.peer, message.request)
        if len(self.forwarded) > 1_000:  # answers that never came
            del self.forwarded[next(iter(self.forwarded))]
        self.requests.reply(target.peer, message.model_copy(update={"request": self.forwards}))

    def on_control_reply(self, message: ControlReply | ErrorReply, _incoming: Incoming) -> None:
        """What the instance did, or why it refused."""
        asker = self.forwarded.pop(message.request, None)
        if asker is not None:
            self.requests.reply(asker[0], message.model_copy(update={"request": asker[1]}))

    def on_status_request(self, message: StatusRequest, incoming: Incoming) -> None:
        self.requests.reply(incoming.peer, self.status().model_copy(update={"request": message.request}))

    def status(self) -> RunStatus:
        now, totals = time.monotonic(), self.progress.totals
        services = [self._own_status(now), *self.roster.statuses(now)]
        return RunStatus(
            state=self.run_book.state,
            run_id=self.run_book.run_id,
            elapsed_s=self.run_book.elapsed_s(now),
            epochs=totals.epochs,
            env_steps=totals.env_steps,
            agent_steps=totals.agent_steps,
            services=tuple(sorted(services, key=lambda service: (service.service, service.instance))),
            agents={agent: self._agent_status(agent) for agent in self.spec_book.specs},
            counters=dict(self.counters + self.requests.counters + self.broadcaster.counters),
            failures=self.roster.failures(now),
        )

    def _own_status(self, now: float) -> ServiceStatus:
        return ServiceStatus(
            service="param_server",
            instance=self.instance,
            incarnation="0" * 32,
            pid=os.getpid(),
            host=socket.gethostname(),
            up_s=now - self.started,
            seen_s=0.0,
            ready=True,
            done=False,
            holds="the run",
            waiting_for="",
            metrics={},
        )

    def _agent_status(self, agent: str) -> AgentStatus:
        holder, newest = self.leases.holder(agent), self.versions.newest(agent)
        return AgentStatus(
            version=newest.version if newest else 0,
            updates=newest.updates if newest else 0,
            token=holder.number if holder else 0,
            learner=holder.instance if holder else "",
            recent_return=self.progress.recent_return(agent),
        )


def _why_not_yet(message: Request) -> Refused:
    """Why a request that was held could not be answered before its deadline."""
    if isinstance(message, SpecRequest):
        return Refused("not_yet", "no actor has registered specs yet")
    if isinstance(message, RoundRequest):
        return Refused("not_yet", "the learners are not so far")
    if isinstance(message, PermitRequest):
        return Refused("not_yet", "others train, as many as parallel.num_workers allows")
    return Refused("no_lease", "every agent has a learner")


def _as_message(broadcast: Broadcast) -> tuple[Weights, dict[str, Any]]:
    weights = Weights(
        agent=broadcast.agent,
        version=broadcast.version,
        updates=broadcast.updates,
        base=broadcast.base,
        checksum=broadcast.checksum,
    )
    return weights, broadcast.tensors
