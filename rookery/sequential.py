"""A whole run in one process and one thread, without sockets: for a debugger, and as the measure of lockstep.

The same classes as the services': rollouts, buffers, algorithms, versions and checkpoints, joined by a loop
that reads like the schedule. Breakpoints in a world or an algorithm work as everywhere. For one config the
weights are bit for bit those of a lockstep run, whose directory looks the same: either resumes the other's.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from rookery.interrupts import Interrupts
from rookery.launcher import Ending
from rookery.manifest import keep, write_manifest
from rookery.run_directory import RunDirectory
from rookery.view import View
from services.actor.rollout import Played
from services.actor.rounds import RoundPlayer
from services.actor.segments import Cut, make_segment
from services.learner.algorithms import algorithm_for
from services.learner.checkpoint import pack, unpack
from services.learner.figures import Figures
from services.learner.training import SkippedInARow, aligned, beta_at, finite
from services.param_server.checkpoints import CheckpointStore
from services.param_server.progress import Progress
from services.param_server.rounds import RoundGate
from services.param_server.run_state import RunBook
from services.param_server.spec_book import SpecBook
from services.param_server.versions import VersionStore
from services.replay.opening import in_rounds, open_buffer
from shared.config import Config
from shared.errors import ConfigError
from shared.layout import Arrays
from shared.messages import AgentStatus, EpochSummary, RunStatus, ServiceName, ServiceStatus
from shared.ownership import owned
from shared.schedule import Schedule
from shared.specs import AgentSpec

SHOW_EVERY_S = 1.0


class SequentialActor:
    """One virtual actor and its streams."""

    def __init__(self, config: Config, index: int) -> None:
        self.index = index
        self.incarnation = uuid.uuid4().hex
        self.player = RoundPlayer(config, index)
        self.sequences: Counter[str] = Counter()
        self.summaries = 0


class SequentialLearner:
    """One agent's algorithm with its buffer."""

    def __init__(self, config: Config, agent: str, specs: dict[str, AgentSpec], run: RunDirectory) -> None:
        self.agent, self.settings = agent, config.learner_for(agent)
        self.algorithm = algorithm_for(config, specs, agent)
        self.directory = run.replay / agent
        self.rounds = in_rounds(open_buffer(self.directory, agent, specs[agent], config), config)
        self.rounds.load(self.directory)
        self.figures = Figures()
        self.skipped = SkippedInARow(self.settings.max_skipped)
        self.version = 0

    def train(self) -> None:
        """One phase: every draw that is due."""
        rounds = self.rounds
        while rounds.answered < rounds.due_draws:
            draw = rounds.next_draw
            batch = rounds.draw(draw, self.settings.batch_size, beta_at(self.settings.priority, draw))
            report = self.algorithm.update(aligned(batch))
            self.skipped.note(report is None)
            rows = slice(0) if report is None else slice(None)
            priorities = batch["weight"][:0] if report is None else report.priorities
            rounds.take_update(draw, batch["index"][rows], batch["generation"][rows], priorities)
            if report is not None:
                self.figures.add(report, age=self.version - float(batch["version"].mean()))

    def policy(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in finite(self.algorithm.policy()).items()}

    def packed(self) -> bytes:
        counters = {"next_draw": self.rounds.next_draw, "rounds": self.rounds.rounds}
        return pack(finite(self.algorithm.checkpoint()), counters)


class SequentialRun:
    """Owns everything of one run."""

    def __init__(self, run: RunDirectory, config: Config, view: View) -> None:
        self.run, self.config, self.view = run, config, view
        self.started = time.monotonic()
        self.interrupts = Interrupts(self._on_interrupt)
        self._shown = -1e9
        self._kept = self.started
        self._turn_rate = 0.0

    def _open(self) -> None:
        """The files of the run, and everything that lives in memory."""
        run, config, params = self.run, self.config, self.run.path / "params"
        run.manifest_path.unlink(missing_ok=True)  # from here on it is not true any more
        torch.set_num_threads(config.learner.threads)
        self.run_book = RunBook(
            params / "run.json", minutes=config.run.minutes, agent_steps=None, now=self.started
        )
        self.versions = VersionStore(params / "agents", config.param_server.keep_versions)
        self.checkpoints = CheckpointStore(run.path / "checkpoints")
        self.progress = Progress(params / "progress.jsonl")
        self.schedule = Schedule.of(config)
        self.gate = RoundGate(self.schedule)
        self.actors = [SequentialActor(config, index) for index in range(config.actor.count)]
        self.specs = dict(self.actors[0].player.specs)
        SpecBook(params / "specs.json").register(self.specs)
        learning = [agent for agent in self.specs if config.learns(agent)]
        self.learners = {agent: SequentialLearner(config, agent, self.specs, run) for agent in learning}
        self.threads = self._open_threads()
        for learner in self.learners.values():
            self._resume(learner)

    def _open_threads(self) -> ThreadPoolExecutor | None:
        """Where agents train side by side, if they are to (`parallel.use_threads`)."""
        parallel = self.config.parallel
        at_once = parallel.training_at_once or len(self.learners)
        return ThreadPoolExecutor(at_once, "train") if parallel.use_threads and at_once > 1 else None

    def _resume(self, learner: SequentialLearner) -> None:
        """Where the agent's newest checkpoint is, or at version 1."""
        data = self._checkpoint_bytes(learner.agent)
        newest = self.versions.newest(learner.agent)
        if data is None and newest is None:
            self._publish(learner, "first")
            return
        if data is None or newest is None:
            raise ConfigError(f"{learner.agent} has weights without a checkpoint, or the other way round")
        tensors, counters = unpack(data)
        learner.algorithm.restore(tensors)
        learner.version = newest.version
        if counters.get("rounds") != learner.rounds.rounds:
            raise ConfigError(
                f"{learner.agent}: the checkpoint is of round {counters.get('rounds')}, replay has "
                f"{learner.rounds.rounds}; the run was not stopped between two rounds"
            )

    def _checkpoint_bytes(self, agent: str) -> bytes | None:
        piece = self.checkpoints.piece(agent, 0, 1 << 40)
        return piece[3] if piece else None

    # --- the run ------------------------------------------------------------------------------------------

    def launch(self, resume: bool) -> Ending:
        """Plays and trains until a limit is reached or a person has had enough; always between two rounds."""
        with self.interrupts, owned(self.run.path / "params" / "service.lock"):
            self._open()
            if resume and self.gate.is_over(self._newest_versions()):
                raise ConfigError("the run cannot resume: run.agent_steps were played; raise it first")
            if self.run_book.state != "running":
                self.run_book.resume(time.monotonic(), 0)
            number = self.gate.first_round(self._newest_versions())
            while not self._over(number):
                self._round(number)
                number += 1
                self._show()
                self._keep_manifest()
            return self._end()

    def _on_interrupt(self) -> None:
        self.view.say("ending after this round (Ctrl-C again to end at once, in the middle of it)")

    def _keep_manifest(self) -> None:
        """Now and then a copy of the whole run, to go back to."""
        if time.monotonic() - self._kept < 60.0 * self.config.run.manifest_minutes:
            return
        self._rest()
        write_manifest(self.run, self.config)
        keep(self.run)
        self.run.manifest_path.unlink()
        self._kept = time.monotonic()

    def _rest(self) -> None:
        """Everything on the disk as it is between two rounds."""
        for learner in self.learners.values():
            data = learner.packed()
            self.checkpoints.add_chunk(
                learner.agent, uuid.uuid4().hex, 0, len(data), zlib.crc32(data), memoryview(data)
            )
            learner.rounds.save(learner.directory)
            learner.rounds.buffer.sync()

    def _round(self, number: int) -> None:
        self._play(number)
        for learner in self.learners.values():
            learner.rounds.advance()
        self._train()
        for learner in self.learners.values():
            self._publish(learner, f"phase-{number}")

    def _over(self, number: int) -> bool:
        now = time.monotonic()
        self.run_book.tick(now)
        late = self.run_book.limit_reached(now, 0)
        return bool(late) or bool(self.interrupts.count) or self.gate.is_past(number)

    def _play(self, number: int) -> None:
        wanted = self.schedule.version_for(number)
        began, turns = time.monotonic(), 0
        for actor in self.actors:
            for agent in self.learners:
                actor.player.load(agent, wanted, self.versions.load(agent, wanted).tensors)
            segments, played = actor.player.play(number)
            turns += self.config.world.max_turns
            for agent, cuts in segments.items():
                self._offer(actor, agent, number, cuts)
            self._count(actor, played)
        self._turn_rate = turns * self.config.actor.envs / max(time.monotonic() - began, 1e-9)

    def _offer(self, actor: SequentialActor, agent: str, number: int, cuts: list[Cut]) -> None:
        for place, cut in enumerate(cuts):
            actor.sequences[agent] += 1
            segment = make_segment(
                cut,
                run=self.run_book.run_id,
                incarnation=actor.incarnation,
                agent=agent,
                sequence=actor.sequences[agent],
                produced_steps=actor.player.produced_steps[agent],
                actor_index=actor.index,
                number=number,
                closes_round=place == len(cuts) - 1,
            )
            self.learners[agent].rounds.offer(segment.head, segment.arrays)

    def _count(self, actor: SequentialActor, played: Played) -> None:
        actor.summaries += 1
        summary = EpochSummary(
            number=actor.summaries,
            epochs=played.epochs,
            env_steps=played.env_steps,
            agent_steps=played.agent_steps,
            return_sums=played.return_sums,
        )
        elapsed_s = self.run_book.elapsed_s(time.monotonic())
        self.progress.take(actor.incarnation, actor.index, summary, elapsed_s)

    def _train(self) -> None:
        """Every agent's phase: one after another, or in threads."""
        if self.threads is None:
            for learner in self.learners.values():
                learner.train()
            return
        for future in [self.threads.submit(learner.train) for learner in self.learners.values()]:
            future.result()

    def _publish(self, learner: SequentialLearner, publish_id: str) -> None:
        version, is_new = self.versions.publish(
            learner.agent,
            learner.policy(),
            publish_id=publish_id,
            updates=learner.algorithm.updates,
            token=1,
        )
        assert is_new
        learner.version = version

    # --- the end ------------------------------------------------------------------------------------------

    def _end(self) -> Ending:
        now = time.monotonic()
        ledger = self._ledger(now)  # before the files are described: it writes the streams' ends into them
        self._rest()
        self.run_book.drain(now)
        self.run_book.finish(now)
        status = self.status()
        self.view.show(status, 0)
        self.progress.close()
        write_manifest(self.run, self.config)
        if self.threads is not None:
            self.threads.shutdown()
        return Ending(status, ledger, bool(self.interrupts.count), now - self.started, {})

    def _ledger(self, now: float) -> dict[str, int]:
        total: Counter[str] = Counter()
        for agent, learner in self.learners.items():
            buffer = learner.rounds.buffer
            for actor in self.actors:
                buffer.report(actor.incarnation, actor.player.produced_steps[agent], True, now)
            total.update(buffer.ledger(now, self.config.param_server.lease_s, closing=True))
        return dict(total)

    # --- what a person sees -------------------------------------------------------------------------------

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown >= SHOW_EVERY_S:
            self._shown = now
            self.view.show(self.status(), 0)

    def status(self) -> RunStatus:
        """The run as the parameter server of other modes would tell it."""
        now, totals = time.monotonic(), self.progress.totals
        return RunStatus(
            state=self.run_book.state,
            run_id=self.run_book.run_id,
            elapsed_s=self.run_book.elapsed_s(now),
            epochs=totals.epochs,
            env_steps=totals.env_steps,
            agent_steps=totals.agent_steps,
            services=tuple(self._services(now)),
            agents={agent: self._agent_status(agent) for agent in self.specs},
            counters={},
        )

    def _services(self, now: float) -> Iterator[ServiceStatus]:
        yield self._part(now, "actor", "all", {"env_steps_per_s": self._turn_rate})
        for agent, learner in self.learners.items():
            buffer = learner.rounds.buffer
            fill = buffer.drawable_steps / buffer.capacity_steps
            yield self._part(now, "learner", agent, learner.figures.take())
            yield self._part(now, "replay", agent, {f"fill.{agent}": fill})

    def _part(self, now: float, service: ServiceName, holds: str, metrics: dict[str, float]) -> ServiceStatus:
        return ServiceStatus(
            service=service,
            instance="sequential",
            incarnation=self.actors[0].incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            up_s=now - self.started,
            seen_s=0.0,
            ready=True,
            done=False,
            holds=holds,
            waiting_for="",
            metrics=metrics,
        )

    def _agent_status(self, agent: str) -> AgentStatus:
        learner = self.learners.get(agent)
        return AgentStatus(
            version=learner.version if learner else 0,
            updates=learner.algorithm.updates if learner else 0,
            token=0,
            learner="sequential" if learner else "",
            recent_return=self.progress.recent_return(agent),
        )

    def _newest_versions(self) -> dict[str, int]:
        return {agent: learner.version for agent, learner in self.learners.items()}
