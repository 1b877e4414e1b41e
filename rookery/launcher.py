"""A local run, from the first process to the summary. All wiring of a local run is in `_start_services`.

The parameter server owns the run's state; the launcher only starts processes, starts them again when they
die, shows what the parameter server broadcasts, and asks it to drain when a person presses Ctrl-C.
"""

from __future__ import annotations

import signal
import time
import uuid
from dataclasses import dataclass

from rookery.last_words import last_words
from rookery.ledger import add_up
from rookery.processes import Child, Processes
from rookery.run_directory import RunDirectory
from rookery.view import View
from shared.codec import Received
from shared.config import Config
from shared.errors import ConfigError, PeerSilent, RookeryError
from shared.links.broadcast import BroadcastListener
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.logs import get_logger
from shared.loop import Loop
from shared.messages import (
    ControlRequest,
    FailureReport,
    Hello,
    Ledger,
    LedgerRequest,
    Message,
    Produced,
    ProducedRequest,
    Request,
    RunStatus,
    StatusRequest,
    Welcome,
    expect,
)

log = get_logger()

INTERRUPT_DRAIN_S = 3.2  # after Ctrl-C; together with the rest it must stay below 5 s
INTERRUPT_GRACE_S = 1.0
END_GRACE_S = 10.0  # replay puts its files on the disk
HANGING_S = 5.0  # a process that is still there so long after the run has finished is ended
START_TIMEOUT_S = 60.0
ANSWER_S = 5.0
LOOK_AGAIN_S = 2.0  # by then the news of a change of state has come


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known when all processes have ended."""

    status: RunStatus
    ledger: dict[str, int]
    interrupted: bool
    wall_s: float
    restarts: dict[str, int]
    leg_over: bool = False  # in lockstep: stopped between two rounds only to be copied
    ended_at_once: bool = False  # in lockstep: not between two rounds, as a person wanted


class NotBegun(PeerSilent):
    """A person ended the run before it began; its files are as they were."""


class ServiceDied(RookeryError):
    """In lockstep: a process died, and with it what it held of the round. Go back to the last manifest."""

    def __init__(self, instance: str, how: str, wall_s: float, interrupted: bool) -> None:
        super().__init__(f"{instance} {how}")
        self.instance, self.wall_s, self.interrupted = instance, wall_s, interrupted


class Launcher:
    """Runs one local run to its end."""

    def __init__(self, run: RunDirectory, config: Config, view: View) -> None:
        self.run, self.config, self.view = run, config, view
        self.loop = Loop()
        self.network = Network.of(config, self.loop)
        self.processes = Processes(run.logs)
        self.status: RunStatus | None = None
        self.interrupted = 0
        self.started = time.monotonic()
        self.fatal = ""
        self.lockstep = config.parallel.mode == "lockstep"
        self.died: tuple[str, str] | None = None  # in lockstep: which process, and how
        self.leg_over = False
        self._epochs_before: int | None = None  # this leg
        self.params = self._open(config.endpoints.params)

    def launch(self, resume: bool) -> Ending:
        """Starts everything, returns when everything has ended."""
        self.loop.on_signal(signal.SIGINT, self.on_interrupt)
        self.loop.on_signal(signal.SIGTERM, self.on_interrupt)
        self.loop.on_signal(signal.SIGCHLD, self.on_child_ended)
        ledger: dict[str, int] = {}
        try:
            self._start_services(resume)
            self._watch()
            if self.died is None:
                ledger = self._ledger()
                self._final_status()
        finally:
            self.processes.end(INTERRUPT_GRACE_S if self.interrupted else END_GRACE_S)
            self.network.close()
            self.loop.close()
        if self.fatal:
            raise ConfigError(self.fatal)
        self._raise_if_died()
        if self.status is None:
            raise PeerSilent(f"the run ended before it began; see {self.run.logs}")
        restarts = {
            child.instance: child.restarts for child in self.processes.children.values() if child.restarts
        }
        return Ending(
            self.status,
            ledger,
            bool(self.interrupted),
            time.monotonic() - self.started,
            restarts,
            leg_over=self.leg_over and not self.interrupted,
            ended_at_once=self.lockstep and self.status.state != "finished",
        )

    def _raise_if_died(self) -> None:
        if self.died is not None:
            raise ServiceDied(*self.died, time.monotonic() - self.started, bool(self.interrupted))

    # --- wiring -----------------------------------------------------------------------------------------

    def _start_services(self, resume: bool) -> None:
        common = ["--config", str(self.run.config_path), "--run-dir", str(self.run.path)]
        self.processes.add("param_server", "param_server", common)
        if resume:  # services that join a finished run would leave at once: first make it run again
            self._join()
            self._resume()
        for number in range(len(self.config.endpoints.replay)):
            self.processes.add(f"replay-{number}", "replay", [*common, "--number", str(number)])
        for number in range(self.config.actor.count):
            self.processes.add(f"actor-{number}", "actor", common)
        for number in range(len(self.config.learning_agents)):
            self.processes.add(f"learner-{number}", "learner", common)
        if not resume:
            self._join()

    def _join(self) -> None:
        """Connects to the parameter server as soon as it answers."""
        hello = Hello(service="launcher", instance="launcher", incarnation=uuid.uuid4().hex)
        welcome = expect(self._call(self.params, hello, START_TIMEOUT_S), Welcome)
        self.params.run = welcome.run_id
        self.listener = BroadcastListener(
            self.network,
            self.config.endpoints.broadcast,
            run=welcome.run_id,
            on_status=self.on_run_status,
        )

    def _resume(self) -> None:
        self._call(self.params, ControlRequest(action="resume"), START_TIMEOUT_S)

    def _open(self, endpoint: str) -> RequestSender:
        return RequestSender(self.network, endpoint, identity=uuid.uuid4().hex)

    def _call(self, link: RequestSender, message: Request, timeout_s: float) -> Message:
        """Asks and waits, while children that die are still noticed."""
        outcome: list[Received | RookeryError] = []
        link.ask(
            message, on_reply=outcome.append, on_failure=outcome.append, timeout_s=timeout_s, retry_s=0.3
        )
        self.loop.turn_until(
            lambda: bool(outcome or self.fatal or self.died) or self._gives_up(), timeout_s + 1.0
        )
        if self.fatal:
            raise ConfigError(self.fatal)
        self._raise_if_died()
        if not outcome and self._gives_up():
            raise NotBegun("interrupted before the run began")
        if not outcome:
            raise PeerSilent(f"{link.endpoint} did not answer; see {self.run.logs}")
        if isinstance(outcome[0], RookeryError):
            raise outcome[0]
        return outcome[0].message

    def _gives_up(self) -> bool:
        """Interrupted twice, or before there was a run that could drain."""
        return self.interrupted > 1 or (self.interrupted > 0 and not self.params.run)

    # --- while it runs ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the run is finished, or until a person has waited long enough for it to drain."""
        while not self._ended():
            self.loop.turn(block=True)

    def _ended(self) -> bool:
        finished = self.status is not None and self.status.state == "finished"
        workers = any(
            child.module in ("services.actor", "services.learner") for child in self.processes.running
        )
        return (finished and not workers) or self.loop.stopping or bool(self.fatal)

    def on_run_status(self, status: RunStatus) -> None:
        if status.state == "finished" and (self.status is None or self.status.state != "finished"):
            self.loop.after(HANGING_S, lambda: self.loop.stop("the run is finished"))
        if self.lockstep:
            self._time_leg(status)
        self.status = status
        restarts = sum(child.restarts for child in self.processes.children.values())
        self.view.show(status, restarts)

    def on_interrupt(self) -> None:
        """The first asks the run to drain, the second ends it now."""
        self.interrupted += 1
        if self.interrupted > 1:
            self.loop.stop("interrupted twice")
            return
        if not self.params.run:
            return  # nothing has begun: _call gives up
        if self.lockstep:
            self.view.say("ending after this round (Ctrl-C again to end at once, in the middle of it)")
        else:
            self.view.say("draining: actors flush, learners checkpoint (Ctrl-C again to end at once)")
            self.loop.after(INTERRUPT_DRAIN_S, lambda: self.loop.stop("drained for long enough"))
        self._drain()

    def _drain(self) -> None:
        self.params.ask(
            ControlRequest(action="drain"),
            on_reply=lambda _received: None,
            on_failure=lambda error: log.warning("cannot drain", reason=str(error)),
            timeout_s=2.0,
            retry_s=0.5,
        )

    def _time_leg(self, status: RunStatus) -> None:
        """A leg is timed from its first round on: one that ended before it would lead nowhere."""
        if self.status is None:
            self._epochs_before = status.epochs
        elif self._epochs_before is not None and status.epochs > self._epochs_before:
            self._epochs_before = None
            self.loop.after(60.0 * self.config.run.manifest_minutes, self._end_leg)

    def _end_leg(self) -> None:
        """In lockstep, now and then: the run stops between two rounds and is copied."""
        if self.status is not None and self.status.state == "paused":
            self.loop.after(LOOK_AGAIN_S, self._end_leg)
        elif not self.interrupted:
            self.leg_over = True
            self._drain()

    def on_child_ended(self) -> None:
        for child, code in self.processes.reap():
            self._on_ended(child, code)

    def _on_ended(self, child: Child, code: int) -> None:
        if self.lockstep and code != 2:
            self._on_ended_in_lockstep(child, code)
            return
        winding_down = self.interrupted or self._draining
        if code == 0 and (winding_down or child.module in ("services.actor", "services.learner")):
            child.finished = True
            return
        if code == 2:
            words = self._last_words(child) or "it said nothing"
            self.fatal = f"{child.instance} cannot work with this config: {words}"
            return
        if winding_down and child.module in ("services.actor", "services.learner"):
            child.finished = True  # there is nothing left for it to do
            return
        wait_s = self.processes.start_again(child, failed=code > 0)
        how = self._how_it_ended(child, code)
        self.view.say(
            f"{child.instance} {how}; starting it again" + (f" in {wait_s:.1f} s" if wait_s else "")
        )
        self._report_failure(child, how)
        self.loop.after(wait_s, self.processes.start_due)

    @property
    def _draining(self) -> bool:
        return self.status is not None and self.status.state in ("draining", "finished")

    def _on_ended_in_lockstep(self, child: Child, code: int) -> None:
        """What it held of the round in memory is gone, and there is no round without it."""
        child.finished = True
        how = self._how_it_ended(child, code)
        if self._draining and (code == 0 or child.module == "services.actor"):
            return  # of an actor everything is stored by now
        if code == 0:  # it may know before us that the run drains
            self.loop.after(LOOK_AGAIN_S, lambda: None if self._draining else self._give_up(child, how))
        else:
            self._give_up(child, how)

    def _give_up(self, child: Child, how: str) -> None:
        self.died = self.died or (child.instance, how)
        self.loop.stop(f"{child.instance} died")

    def _how_it_ended(self, child: Child, code: int) -> str:
        if code < 0:
            return f"killed by signal {-code}"
        words = self._last_words(child)
        return f"ended with code {code}" + (f" ({words})" if words else "")

    def _report_failure(self, child: Child, how: str) -> None:
        """For `rookery status`; and what it held need not be waited for, since we saw it die."""
        self.params.ask(
            FailureReport(instance=child.instance, pid=child.pid, reason=how[:2_000]),
            on_reply=lambda _received: None,
            on_failure=lambda error: log.warning("failure not reported", reason=str(error)),
            timeout_s=10.0,
        )

    def _last_words(self, child: Child) -> str:
        return last_words(self.run.logs / f"{child.instance}.log")

    # --- the end ----------------------------------------------------------------------------------------

    def _ledger(self) -> dict[str, int]:
        """Every step accounted for, summed over the replay services."""
        timeout_s = 1.0 if self.interrupted else ANSWER_S
        ledgers: list[Ledger] = []
        try:
            for endpoints in self.config.endpoints.replay:
                link = self._open(endpoints.requests)
                link.run = self.params.run
                ledger = expect(self._call(link, LedgerRequest(closing=True), timeout_s), Ledger)
                ledgers.append(ledger)
            produced = self._call(self.params, ProducedRequest(), timeout_s)
        except RookeryError as error:
            self.view.say(f"no ledger: {error}")
            return {}
        return add_up(ledgers, expect(produced, Produced).steps)

    def _final_status(self) -> None:
        try:
            status = self._call(self.params, StatusRequest(), 1.0 if self.interrupted else ANSWER_S)
        except RookeryError as error:
            log.warning("no final status; the last broadcast is used", reason=str(error))
            return
        self.status = expect(status, RunStatus)
