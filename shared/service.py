"""What replay, learners and actors share: joining the run, heartbeats, following its state, ending well.

A subclass names its own handlers and does its work in `work()`; everything it waits for goes through
`self.loop`. It ends in one way only, `wind_down()`, whether the run drains, a signal asks, or a person does.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import ClassVar

from shared.codec import Received
from shared.config import Config
from shared.errors import PeerSilent, Refused, RookeryError
from shared.health_socket import Health, open_health_socket
from shared.links.broadcast import BroadcastListener
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.logs import get_logger
from shared.loop import Loop
from shared.messages import (
    ControlReply,
    ControlRequest,
    EpochSummary,
    ErrorReply,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LeaseGrant,
    LeaseRequest,
    Message,
    Release,
    Request,
    RunNotice,
    RunState,
    ServiceName,
    SpecRequest,
    Specs,
    Token,
    Welcome,
    expect,
)
from shared.specs import AgentSpec

log = get_logger()

ASK_AGAIN_S = 5.0  # how often a service that waits for a peer at its start says so


class Service:
    """A member of a run, with one thread and one loop."""

    name: ClassVar[ServiceName]

    def __init__(self, config: Config, run_dir: Path, instance: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.instance = instance
        self.incarnation = uuid.uuid4().hex
        self.started = time.monotonic()
        self.loop = Loop()
        self.loop.stop_on_signals()
        self.network = Network.of(config, self.loop)
        self.params = self.open_requests(config.endpoints.params)
        self.params.volunteered["control_request"] = self.on_control_request
        self.notices: BroadcastListener | None = None
        self.state: RunState = "running"
        self.held = False  # paused by a person, this instance alone
        self.ready = False
        self.token: Token | None = None
        self.index: int | None = None
        self.waiting_for = ""
        self.standing_by = False  # it waits, and that is as it should be
        self.health_socket = open_health_socket(self.loop, config.run.health_socket, self.health)
        self.epochs = 0
        self.agent_steps = 0

    # --- what a subclass says -------------------------------------------------------------------------

    def start(self) -> None:
        """Gets what the service needs before its first `work()`."""
        self.join()

    def work(self) -> bool:
        """Does a small piece of work; True when there is more to do at once."""
        return False

    def wind_down(self) -> None:
        """Hands over everything that must not be lost. Bounded in time."""

    def metrics(self) -> dict[str, float]:
        """Figures for heartbeats."""
        return {}

    def epoch_summary(self) -> EpochSummary | None:
        """What was played since the last confirmed summary (actors)."""
        return None

    def on_run_notice(self, notice: RunNotice) -> None:
        """More to do with a notice than following its state."""

    def on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        """More to do with a heartbeat's answer than following its state."""

    # --- the life of a service --------------------------------------------------------------------------

    def run(self) -> None:
        """From start to end; returns when the service has wound down."""
        try:
            self.start()
            self.ready = True
            self._heartbeat()
            log.info("ready", up_s=round(time.monotonic() - self.started, 2))
            while not self.loop.stopping:
                more = self.work()
                self.loop.turn(block=not more)
            log.info("ending", reason=self.loop.stop_reason)
            self.wind_down()
            self._leave()
        except PeerSilent as error:
            if not self.loop.stopping:
                raise
            log.info("ended while waiting", reason=str(error))
        finally:
            self.close()

    def close(self) -> None:
        if self.health_socket is not None:
            self.health_socket.close()
        self.network.close()
        self.loop.close()

    def health(self) -> Health:
        """How it is, for whoever runs its container."""
        if self.ready:
            return Health(True, f"ready; waiting for {self.waiting_for}" if self.waiting_for else "ready")
        return Health(self.standing_by, f"waiting for {self.waiting_for}" if self.waiting_for else "starting")

    @property
    def active(self) -> bool:
        return self.state == "running" and not self.held

    def open_requests(self, endpoint: str) -> RequestSender:
        return RequestSender(self.network, endpoint, identity=self.incarnation)

    def call_patiently(self, link: RequestSender, message: Request, waiting_for: str) -> Message:
        """Asks until there is an answer, saying now and then what is waited for; for start-up."""
        self.waiting_for = waiting_for
        while True:
            try:
                answer = link.call(message, timeout_s=ASK_AGAIN_S).message
            except PeerSilent:
                if self.loop.stopping:
                    raise
                self.standing_by = False
                log.info("waiting", waiting_for=waiting_for, endpoint=link.endpoint)
            except Refused as error:
                if error.code not in ("not_yet", "no_lease"):
                    raise
                self.standing_by = error.code == "no_lease"
                log.info("waiting", waiting_for=waiting_for, reason=str(error))
            else:
                self.waiting_for, self.standing_by = "", False
                return answer

    def join(self) -> None:
        """Learns which run this is and begins to follow it."""
        welcome = self._welcome()
        while self.config.run.stay and self.ends_with(welcome.state):
            self._stand_by(f"the run, which is {welcome.state}, to be resumed")
            welcome = self._welcome()
        self.params.run = welcome.run_id
        self._follow(welcome.state)
        self.listen()
        self._heartbeats = self.loop.every(self.config.param_server.heartbeat_s, self._heartbeat)
        self._heartbeat()

    def _welcome(self) -> Welcome:
        hello = Hello(service=self.name, instance=self.instance, incarnation=self.incarnation)
        return expect(self.call_patiently(self.params, hello, "the parameter server"), Welcome)

    def _stand_by(self, waiting_for: str) -> None:
        """For a moment, before it looks again."""
        if not self.standing_by:
            log.info("standing by", waiting_for=waiting_for)
        self.waiting_for, self.standing_by = waiting_for, True
        if self.loop.turn_until(lambda: self.loop.stopping, ASK_AGAIN_S):
            raise PeerSilent(f"stopped ({self.loop.stop_reason}) while waiting for {waiting_for}")

    def join_known(self, run_id: str) -> None:
        """Begins at once with a run that is known from earlier; the parameter server may come later."""
        self.params.run = run_id
        hello = Hello(service=self.name, instance=self.instance, incarnation=self.incarnation)
        self.params.ask(
            hello,
            on_reply=lambda _received: None,
            on_failure=self._on_heartbeat_failure,
            timeout_s=ASK_AGAIN_S,
        )
        self.listen()
        self._heartbeats = self.loop.every(self.config.param_server.heartbeat_s, self._heartbeat)
        self._heartbeat()

    def listen(self) -> None:
        """Subscribes to the run's notices; a subclass that wants weights as well overrides this."""
        self.notices = BroadcastListener(
            self.network,
            self.config.endpoints.broadcast,
            run=self.params.run,
            on_notice=self._on_notice,
        )

    def get_specs(self) -> dict[str, AgentSpec]:
        specs = self.call_patiently(self.params, SpecRequest(), "an actor to register the agents' specs")
        return expect(specs, Specs).specs

    def get_lease(self, role: str, agent: str | None = None) -> LeaseGrant:
        message = LeaseRequest(
            role=role,
            instance=self.instance,
            incarnation=self.incarnation,
            agent=agent,
        )
        grant = expect(self.call_patiently(self.params, message, f"a lease as {role}"), LeaseGrant)
        self.token, self.index = grant.token, grant.index
        return grant

    # --- heartbeats and state ---------------------------------------------------------------------------

    def heartbeat(self, done: bool = False) -> Heartbeat:
        """The heartbeat of this moment."""
        return Heartbeat(
            service=self.name,
            instance=self.instance,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            up_s=time.monotonic() - self.started,
            token=self.token,
            index=self.index,
            ready=self.ready,
            done=done,
            waiting_for=self.waiting_for[:2_000],
            metrics=self.metrics(),
            epochs=self.epoch_summary(),
        )

    def _heartbeat(self) -> None:
        period_s = 2 * self.config.param_server.heartbeat_s
        self.params.ask(
            self.heartbeat(),
            on_reply=self._on_heartbeat_reply,
            on_failure=self._on_heartbeat_failure,
            timeout_s=period_s,
            retry_s=period_s,
        )

    def _on_heartbeat_reply(self, received: Received) -> None:
        reply = expect(received.message, HeartbeatReply)
        self.epochs, self.agent_steps = reply.epochs, reply.agent_steps
        self._follow(reply.state)
        self.on_heartbeat_reply(reply)

    def _on_heartbeat_failure(self, error: RookeryError) -> None:
        log.warning("heartbeat not answered", reason=str(error))
        if isinstance(error, Refused) and error.code == "other_run":
            self.loop.stop("the parameter server keeps another run now")

    def _on_notice(self, notice: RunNotice) -> None:
        self.epochs, self.agent_steps = notice.epochs, notice.agent_steps
        self._follow(notice.state)
        self.on_run_notice(notice)

    def _follow(self, state: RunState) -> None:
        if state != self.state:
            log.info("run state", was=self.state, now=state)
        self.state = state
        if self.ends_with(state):
            self.loop.stop(state)

    def ends_with(self, state: RunState) -> bool:
        """Whether the service ends in this state of the run; replay overrides it and stays."""
        return state in ("draining", "finished")

    def _leave(self) -> None:
        """The last words: done, and the lease back. No heartbeat may come after them."""
        self._heartbeats.cancel()
        for message in (
            self.heartbeat(done=True),
            Release(instance=self.instance, incarnation=self.incarnation),
        ):
            self.params.ask(
                message,
                on_reply=lambda _received: None,
                on_failure=lambda _error: None,
                timeout_s=1.0,
                retry_s=0.3,
            )
        self.params.flush(1.0)

    # --- control ----------------------------------------------------------------------------------------

    def on_control_request(self, received: Received) -> None:
        """What a person asks of this instance, forwarded by the parameter server."""
        request = expect(received.message, ControlRequest)
        if request.action == "pause":
            self.held = True
        elif request.action == "resume":
            self.held = False
        elif request.action == "stop":
            self.loop.stop("asked to")
        elif request.action == "set":
            try:
                self.set_values(request.values)
            except Refused as error:
                log.warning("refused", kind=request.kind, code=error.code, reason=str(error))
                answer = ErrorReply(request=request.request, code=error.code, reason=str(error)[:2_000])
                self.params.tell(answer)
                return
        self.params.tell(
            ControlReply(
                request=request.request,
                service=self.name,
                instance=self.instance,
                state=self.state,
                ready=self.ready,
                waiting_for=self.waiting_for[:2_000],
                metrics=self.metrics(),
            )
        )

    def set_values(self, values: dict[str, float]) -> None:
        """Changes settings while running, all or none; a subclass that has some overrides this."""
        raise Refused("unknown_value", f"{self.instance} has nothing that can be set: {', '.join(values)}")
