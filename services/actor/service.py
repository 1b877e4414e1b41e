"""An actor: plays the world with the newest weights and sends what happens to replay.

It joins and leaves at any time: its lease gives it an index (its place on the epsilon ladder, its seed), the
first actor registers the agents' specs. Weights arrive between turns. When replay does not acknowledge, the
window fills and it waits, saying for whom. A journal, if wanted, records each segment before it is sent.

Next: services/replay/service.py
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from services.actor.exploration import epsilons, hash_seed
from services.actor.outbox import Outbox
from services.actor.rollout import Played, Rollout
from services.actor.scripts import try_scripts
from services.actor.segments import Cut, make_segment
from shared.codec import Received
from shared.config import Config
from shared.errors import ConfigError, Refused, RookeryError, SpecMismatch, WorldError
from shared.layout import Arrays
from shared.links.broadcast import BroadcastListener
from shared.links.requests import RequestSender
from shared.links.segments import SegmentSender
from shared.logs import get_logger
from shared.messages import (
    EpochSummary,
    HeartbeatReply,
    LeaseGrant,
    LeaseRequest,
    RunNotice,
    SnapshotRequest,
    SpecRegistration,
    StreamMarks,
    StreamReport,
    Weights,
    expect,
)
from shared.placement import replay_of
from shared.segment_frame import SegmentHead
from shared.service import Service
from shared.specs import AgentSpec
from shared.weights_state import Applied, NeedsSnapshot, WeightsState
from worlds.base import World
from worlds.registry import build_world

log = get_logger()

REPORT_S = 0.5
RATE_WINDOW_S = 5.0
LAST_WORDS_S = 3.0


class ActorService(Service):
    """Plays until the run ends or it is told to go."""

    name = "actor"

    def __init__(self, config: Config, run_dir: Path, instance: str) -> None:
        super().__init__(config, run_dir, instance)
        torch.set_num_threads(1)
        self.weights: dict[str, WeightsState] = {}
        self.asked_for: set[str] = set()  # agents whose snapshot is on its way
        self.summary: EpochSummary | None = None  # sent and not yet confirmed
        self.summaries = 0
        self.own_steps = 0  # of one agent, since the last word of the parameter server
        self.turns = 0
        self.waited_s = 0.0
        self.replay_says: dict[int, str] = {}  # by replay service: why it holds back acknowledgements
        self._waiting_since: float | None = None
        self._turns_at: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self.journal = _open_journal(run_dir, self.incarnation) if config.actor.journal else None

    # --- start ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.join()
        grant = self.get_lease("actor")
        assert grant.index is not None
        specs = self.open_world(grant.index)
        self.agents = list(specs)
        self.learning = [agent for agent in self.agents if self.config.learns(agent)]
        self.call_patiently(self.params, SpecRegistration(specs=dict(specs)), "the parameter server")
        self.outbox = Outbox(self.learning, self.config.actor.window_segments)
        self._connect_replays()
        self.subscribe()
        self.loop.every(REPORT_S, self._report, first_s=0.0)
        log.info("playing", index=grant.index, agents=self.agents, envs=self.config.actor.envs)

    def open_world(self, index: int) -> Mapping[str, AgentSpec]:
        """Gets ready to play; returns the agents' specs."""
        world = self._build_world(index)
        try_scripts(self.config, world)
        self.rollout = Rollout(self.config, world, actor_index=index, first_epoch=self.epochs)
        return world.specs

    def _build_world(self, index: int) -> World:
        # The epoch at which it joins is part of the seed: a resumed run does not play its first epochs again.
        seed = hash_seed(self.config.seed, index, self.epochs)
        try:
            return build_world(self.config.world, self.config.actor.envs, seed)
        except WorldError as error:
            raise ConfigError(str(error)) from error  # starting the actor again would not help

    def _connect_replays(self) -> None:
        self.replays: list[RequestSender] = []
        self.senders: list[SegmentSender] = []
        for endpoints in self.config.endpoints.replay:
            replay = self.open_requests(endpoints.requests)
            replay.run = self.params.run
            replay.volunteered["stream_marks"] = self._on_marks
            self.replays.append(replay)
            self.senders.append(
                SegmentSender(
                    self.network,
                    endpoints.segments,
                    queue=max(64, self.config.actor.window_segments),
                )
            )
        self.home = {agent: replay_of(self.config, self.agents, agent) for agent in self.learning}

    def subscribe(self) -> None:
        """Follows the newest weights of every agent that learns."""
        self.weights = {agent: WeightsState(agent) for agent in self.learning}
        self.broadcasts = BroadcastListener(
            self.network,
            self.config.endpoints.broadcast,
            run=self.params.run,
            on_weights=self._on_weights,
            agents=self.learning,
        )

    # --- the loop ---------------------------------------------------------------------------------------

    def work(self) -> bool:
        self._pump()
        full = self.outbox.full
        if not self.active or full:
            self._wait(self._why_full(full) if full else self._why_idle())
            return False
        self._go_on()
        for agent, cut in self.rollout.turn(self._steps_so_far()):
            self.take_cut(agent, cut)
        self.turns += 1
        self.own_steps += self.rollout.world.envs
        return True

    def _steps_so_far(self) -> float:
        """Steps of one agent over all actors: what the parameter server last said, and our own since."""
        return self.agent_steps / len(self.learning) + self.own_steps

    def _why_idle(self) -> str:
        return f"the run is {self.state}" if self.state != "running" else "held by a person"

    def _why_full(self, full: list[str]) -> str:
        reasons = "; ".join(reason for reason in self.replay_says.values() if reason)
        return f"replay to acknowledge {', '.join(full)}" + (f" ({reasons})" if reasons else "")

    def _wait(self, reason: str) -> None:
        self.waiting_for = reason
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def _go_on(self) -> None:
        self.waiting_for = ""
        if self._waiting_since is not None:
            self.waited_s += time.monotonic() - self._waiting_since
            self._waiting_since = None

    def take_cut(self, agent: str, cut: Cut, closes_round: bool = False) -> None:
        """Gives a finished segment its place in its stream."""
        assert self.index is not None
        segment = make_segment(
            cut,
            run=self.params.run,
            incarnation=self.incarnation,
            agent=agent,
            sequence=self.outbox.next_sequence(agent),
            produced_steps=self.produced_steps()[agent],
            actor_index=self.index,
            number=self.current_round(),
            closes_round=closes_round,
        )
        if self.journal is not None:
            _write_journal(self.journal, segment.head)
        self.outbox.add(segment)

    def _pump(self) -> None:
        for agent in self.learning:
            self.outbox.pump(agent, self.senders[self.home[agent]].send)

    # --- what an actor in rounds does differently -----------------------------------------------------------

    def current_round(self) -> int:
        return 0

    def produced_steps(self) -> dict[str, int]:
        """By agent, all that was played."""
        return self.rollout.produced_steps

    def take_played(self) -> Played:
        """What was played since this was last asked."""
        played, self.rollout.played = self.rollout.played, Played(return_sums=dict.fromkeys(self.agents, 0.0))
        return played

    def open_segments(self) -> list[tuple[str, Cut]]:
        """At the end: what was played and is in no segment yet."""
        return self.rollout.close()

    def mean_epsilon(self) -> float:
        return float(epsilons(self.config.actor.epsilon, self.rollout.floors, self._steps_so_far()).mean())

    # --- acknowledgements -------------------------------------------------------------------------------

    def _report(self, final: bool = False) -> None:
        """Only after the last one was answered: two answers in a row to queued reports say nothing new."""
        for place, replay in enumerate(self.replays):
            if replay.waiting and not final:
                continue
            produced = {
                agent: steps for agent, steps in self.produced_steps().items() if self.home[agent] == place
            }
            report = StreamReport(incarnation=self.incarnation, produced_steps=produced, final=final)
            replay.ask(
                report,
                on_reply=self._on_report_reply,
                on_failure=self._on_no_report,
                timeout_s=2.0,
                retry_s=2.0,
            )

    def _on_report_reply(self, received: Received) -> None:
        self._on_marks(received, reported=True)

    def _on_marks(self, received: Received, reported: bool = False) -> None:
        message = expect(received.message, StreamMarks)
        if message.incarnation != self.incarnation:
            return
        for home in {self.home[agent] for agent in message.marks if agent in self.home}:
            self.replay_says[home] = message.waiting_for
        now = time.monotonic()
        for agent, mark in message.marks.items():
            self.outbox.on_mark(agent, mark, now, reported)

    def _on_no_report(self, error: RookeryError) -> None:
        if isinstance(error, Refused):
            log.warning("replay refused the report", reason=str(error))
        else:
            log.warning("replay is silent; playing on while the window lasts", reason=str(error))

    # --- weights ----------------------------------------------------------------------------------------

    def _on_weights(self, message: Weights, arrays: Arrays) -> None:
        outcome = self.weights[message.agent].apply(message, arrays)
        if isinstance(outcome, Applied):
            self._load(message.agent, outcome.version, outcome.tensors)
        elif isinstance(outcome, NeedsSnapshot):
            log.info("asking for a snapshot", agent=message.agent, reason=outcome.reason)
            self._ask_for_snapshot(message.agent, outcome.version)

    def _load(self, agent: str, version: int, state: Arrays) -> None:
        try:
            self.rollout.load(agent, version, state)
        except SpecMismatch as error:
            log.warning(
                "weights do not fit the network; is the learner's config the same?", reason=str(error)
            )

    def on_run_notice(self, notice: RunNotice) -> None:
        self.own_steps = 0
        for agent, version in notice.versions.items():
            if agent in self.weights and version > self.weights[agent].version:
                self._ask_for_snapshot(agent)

    def _ask_for_snapshot(self, agent: str, version: int | None = None) -> None:
        if agent in self.asked_for:
            return
        self.asked_for.add(agent)

        def on_snapshot(received: Received) -> None:
            self.asked_for.discard(agent)
            self._on_weights(expect(received.message, Weights), received.arrays)

        def on_failure(error: RookeryError) -> None:
            self.asked_for.discard(agent)
            log.warning("no snapshot; the next notice asks again", agent=agent, reason=str(error))

        self.params.ask(
            SnapshotRequest(agent=agent, version=version), on_reply=on_snapshot, on_failure=on_failure
        )

    # --- heartbeats -------------------------------------------------------------------------------------

    def epoch_summary(self) -> EpochSummary | None:
        """The unconfirmed summary if there is one, else a new one of what was played since."""
        if self.summary is None and self.ready:
            played = self.take_played()
            if played.env_steps:
                self.summaries += 1
                self.summary = EpochSummary(
                    number=self.summaries,
                    epochs=played.epochs,
                    env_steps=played.env_steps,
                    agent_steps=played.agent_steps,
                    return_sums=played.return_sums,
                )
        return self.summary

    def on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        if self.summary is not None and reply.epoch_summary >= self.summary.number:
            self.summary = None
        if not reply.lease_held and self.ready and not self.loop.stopping:
            log.warning("the lease lapsed; asking for a new one")
            request = LeaseRequest(role="actor", instance=self.instance, incarnation=self.incarnation)
            self.params.ask(request, on_reply=self._on_new_lease)

    def _on_new_lease(self, received: Received) -> None:
        self.index = expect(received.message, LeaseGrant).index

    def metrics(self) -> dict[str, float]:
        if not self.ready:
            return {}
        rate = self._turns_per_s(time.monotonic())
        figures = {
            "turns_per_s": rate,
            "env_steps_per_s": rate * self.config.actor.envs,
            "unacknowledged_segments": float(self.outbox.unacknowledged_segments),
            "resent_segments": float(self.outbox.resent_segments),
            "waited_s": self.waited_s,
            "epsilon": self.mean_epsilon(),
        }
        for agent, state in self.weights.items():
            figures[f"version.{agent}"] = float(state.version)
        return figures

    def _turns_per_s(self, now: float) -> float:
        """Over the last seconds: paced by replay, an actor plays in bursts of whole epochs."""
        self._turns_at.append((now, self.turns))
        while len(self._turns_at) > 2 and self._turns_at[1][0] < now - RATE_WINDOW_S:
            self._turns_at.popleft()
        since, turns = self._turns_at[0]
        return (self.turns - turns) / max(now - since, 1e-6)

    # --- the end ----------------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """Closes the open segments and stays until replay has stored them all, within a bound."""
        deadline = time.monotonic() + LAST_WORDS_S
        for agent, cut in self.open_segments():
            self.take_cut(agent, cut)
        self._report()
        while not self.outbox.all_stored and time.monotonic() < deadline:
            self._pump()
            self.loop.turn_until(lambda: self.outbox.all_stored, 0.02 if self.outbox.unsent else 0.1)
        if not self.outbox.all_stored:
            log.error("replay did not store everything in time; what is missing counts as abandoned")
            return
        self._report(final=True)
        for replay in self.replays:
            replay.flush(max(0.2, deadline - time.monotonic()))


def _open_journal(run_dir: Path, incarnation: str) -> int:
    path = run_dir / "logs" / f"journal-{incarnation}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _write_journal(descriptor: int, segment: SegmentHead) -> None:
    """One write call for each segment: a killed actor leaves whole lines."""
    line = f"{segment.incarnation} {segment.agent} {segment.sequence} {segment.owned} {segment.checksum}\n"
    os.write(descriptor, line.encode())
