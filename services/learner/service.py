"""One agent's learner: takes batches from replay, trains, sends priorities back, publishes, checkpoints.

Requests for the next batches are always in flight, so an update runs while they travel. Replay or the
parameter server may be gone for a while: without batches it waits, without the parameter server it goes on
training and publishes later. A newer learner for the same agent makes this one stop.

Next: services/learner/algorithms/dqn.py
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import torch

from services.learner.algorithms import algorithm_for
from services.learner.algorithms.base import UpdateReport
from services.learner.checkpoint import Uploader, download, pack, unpack
from services.learner.figures import Figures
from services.learner.permit import Permit
from services.learner.rounds import LearnerRounds, lost_its_place
from services.learner.training import SkippedInARow, Tensors, aligned, beta_at, finite, mean_of
from services.learner.watchdog import Watchdog
from services.learner.workers import Trained, open_trainer
from shared.codec import Received
from shared.config import Config
from shared.errors import ConfigError, PeerSilent, Refused, RookeryError, StaleToken, Stuck, TrainingFailed
from shared.layout import ALIGNMENT_BYTES, Array, Arrays
from shared.links.requests import refusal
from shared.links.trays import LentTray, TrayLender
from shared.logs import get_logger
from shared.messages import (
    Batch,
    ErrorReply,
    HeartbeatReply,
    PriorityUpdate,
    Publish,
    Published,
    SampleRequest,
    SnapshotRequest,
    Weights,
    expect,
)
from shared.placement import replay_of
from shared.service import Service

log = get_logger()

WITHOUT_TRAY = MappingProxyType({"tray": None})
SAMPLE_TIMEOUT_S = 10.0
SAMPLE_RETRY_S = 1.5  # a restarted replay has forgotten held requests; one that holds it ignores the repeat
REFUSED_PAUSE_S = 1.0
LAST_WORDS_S = 3.0
CLOSE_S = 1.0  # what workers get to end when the learner ends by an error


class LearnerService(Service):
    """Trains the agent that its lease names."""

    name = "learner"

    def __init__(self, config: Config, run_dir: Path, instance: str, agent: str | None = None) -> None:
        super().__init__(config, run_dir, instance)
        self.wanted_agent = agent
        self.batches: deque[tuple[int, Arrays]] = deque()  # draw number and rows
        self.in_flight = 0
        self.next_draw = 0
        self.version = 0
        self.publishing = False
        self.published_updates = -1
        self.watchdog: Watchdog | None = None
        self.figures = Figures()
        self.rounds: LearnerRounds | None = None  # in lockstep
        self.unsent: deque[tuple[int, Arrays]] = deque()  # draws with their new priorities, oldest first

    # --- start ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.join()
        specs = self.get_specs()
        self.get_lease("learner", self.wanted_agent)
        assert self.token is not None
        agent = self.token.agent
        self.settings = self.config.learner_for(agent)
        self.skipped = SkippedInARow(self.settings.max_skipped)
        torch.set_num_threads(self.settings.threads)
        self.algorithm = algorithm_for(self.config, specs, agent)
        self.trainer = open_trainer(self.algorithm, self.settings, self.loop.wake)
        self._check_sizes()
        self.uploader = Uploader(self.params, self.token, self.config.limits.max_message_bytes)
        self.replay = self.open_requests(
            self.config.endpoints.replay[replay_of(self.config, specs, agent)].requests
        )
        self.replay.run = self.params.run
        parallel = self.config.parallel
        self.burst = 1 if parallel.mode == "lockstep" else max(1, self.settings.prefetch // 2)
        self.trays = TrayLender(
            # One for each batch that is asked for, waits or is trained on, and a few that are being let go.
            self.settings.prefetch + self.burst + 2 * self.settings.workers + 2,
            enabled=self.config.replay.shared_memory and parallel.mode != "lockstep",
        )
        self.permit = Permit(self.params, self.token, limited=parallel.training_at_once is not None)
        if parallel.mode == "lockstep":
            self.rounds = LearnerRounds(self.replay, self.token, self._publish)
            self.replay.volunteered["error_reply"] = self._on_update_refused
        resumed = self._resume()
        if self.rounds is None:
            self._publish()
            self.loop.every(self.settings.publish_s, self._publish_if_changed)
            self.loop.every(self.settings.checkpoint_s, self._checkpoint)
        elif not resumed:
            self._publish_first()
        self.watchdog = Watchdog(self.loop, self.settings.update_deadline_s)
        log.info(
            "learning",
            agent=agent,
            token=self.token.number,
            device=str(self.algorithm.device),
            updates=self.algorithm.updates,
        )

    def _check_sizes(self) -> None:
        limit = self.config.limits.max_message_bytes
        size = sum(tensor.nbytes + ALIGNMENT_BYTES for tensor in self.algorithm.policy().values())
        if size > limit:
            raise ConfigError(
                f"the network has {size:,} bytes and could never be published: "
                f"limits.max_message_bytes is {limit:,}"
            )

    def _resume(self) -> bool:
        """Goes on from the newest checkpoint, or at least from the newest weights. False: a fresh start."""
        assert self.token is not None
        data = self._patient_download()
        if data is not None:
            tensors, counters = unpack(data)
            self._load(self.algorithm.restore, tensors)
            self.next_draw = counters["next_draw"]
            if self.rounds is not None:
                self.rounds.resume(counters.get("rounds", 0), self.next_draw)
            return True
        try:
            received = self.params.call(SnapshotRequest(agent=self.token.agent), timeout_s=30.0)
        except Refused as error:
            log.info("a fresh start", reason=str(error))
            return False
        expect(received.message, Weights)
        weights = {name: torch.tensor(array) for name, array in received.arrays.items()}
        self._load(self.algorithm.load_policy, weights)
        return True

    def _load(self, load: Callable[[Tensors], None], tensors: Tensors) -> None:
        try:
            load(tensors)
        except (RuntimeError, KeyError) as error:
            assert self.token is not None
            raise ConfigError(
                f"what {self.token.agent} learned so far does not fit the network of this config: {error}; "
                "resume with the network that the run began with"
            ) from None

    def _patient_download(self) -> bytes | None:
        assert self.token is not None
        while True:
            try:
                return download(self.params, self.token)
            except PeerSilent:
                if self.loop.stopping:
                    raise
                log.info("waiting", waiting_for="the parameter server, for a checkpoint")

    # --- the loop ---------------------------------------------------------------------------------------

    def work(self) -> bool:
        if self.uploader.refused is not None:
            raise self.uploader.refused
        if not self.active:
            self._take_trained()
            self._flush_priorities()
            self.waiting_for = f"the run is {self.state}" if self.state != "running" else "held by a person"
            return False
        if self.rounds is not None:
            self.rounds.ask()
        self._request_batches()
        self._hand_out_batches()
        self._take_trained()
        return not self.waiting_for and self.trainer.room > 0 and self._batch_is_here()

    def _hand_out_batches(self) -> None:
        """Gives the trainer what it has room for, and says what it waits for."""
        self.waiting_for = ""
        while self.trainer.room and not self._turn_is_over():
            if not self._batch_is_here():
                self.waiting_for = "" if self.trainer.untrained else self._awaited()
                return
            if not self.permit.obtain():
                self.waiting_for = "a permit to train: others have their turn"
                return
            draw, arrays = self.batches.popleft()
            self._request_batches()  # so that the next one travels during the update
            self.trainer.train(draw, arrays if self.rounds is None else aligned(arrays))

    def _turn_is_over(self) -> bool:
        """A permit is given back once nobody trains any more, so nothing is begun when it is due."""
        return self.rounds is None and self.permit.due

    def _take_trained(self) -> None:
        for trained in self.trainer.finished(idle=not self._batch_is_here()):
            self._after_update(trained)
        if self._lets_others_train() and not self.trainer.untrained:
            self.permit.give_back()

    def _lets_others_train(self) -> bool:
        if self.rounds is not None and self.active:
            return False  # after its phase
        # Batches may wait for actors, and those for a learner that has no permit.
        return not self.active or self._turn_is_over() or not self._batch_is_here()

    def _batch_is_here(self) -> bool:
        """In lockstep only the next draw will do; an answer that was lost once may come after later ones."""
        if self.rounds is None:
            return bool(self.batches)
        self.batches = deque(sorted(self.batches, key=lambda batch: batch[0]))
        return bool(self.batches) and self.batches[0][0] == self.rounds.trained

    def _awaited(self) -> str:
        if self.rounds is not None and self.rounds.at_boundary:
            return f"round {self.rounds.number} to be played"
        return "batches from replay"

    def _after_update(self, trained: Trained) -> None:
        arrays, report = trained.arrays, trained.report
        self.skipped.note(report is None)
        if report is not None or self.rounds is not None:
            self._send_priorities(trained.draw, arrays, report)
        if report is not None:
            self.figures.add(report, age=self.version - mean_of(arrays["version"]))
        if self.rounds is not None:
            self.rounds.on_trained()
        elif self.algorithm.updates - self.published_updates >= self.settings.publish_updates:
            self._publish()

    def _send_priorities(self, draw: int, arrays: Arrays, report: UpdateReport | None) -> None:
        rows: dict[str, Array] = {}
        if report is not None:
            rows = {
                "index": arrays["index"],
                "generation": arrays["generation"],
                "priority": report.priorities,
            }
        self.unsent.append((draw, rows))
        self._flush_priorities(keep=0 if self.rounds is not None else self.burst)

    def _flush_priorities(self, keep: int = 0) -> None:
        """Sends them in messages of their own; usually they ride on the next requests for batches."""
        assert self.token is not None
        while len(self.unsent) > keep:
            draw, rows = self.unsent.popleft()
            sent = self.replay.tell(PriorityUpdate(token=self.token, draw=draw), rows)
            if not sent and self.rounds is not None:
                raise PeerSilent("replay takes no priorities: a run in lockstep cannot go on without them")

    def _on_update_refused(self, received: Received) -> None:
        """In lockstep: without these priorities no other batch comes, and nobody sends them again."""
        message = expect(received.message, ErrorReply)
        if not message.request:  # else it is the second answer to a question
            raise refusal(message)

    def _request_batches(self) -> None:
        """Some at a time: replay is woken, and finds its caches cold, once for all of them."""
        missing = self.settings.prefetch - self.in_flight - len(self.batches)
        if missing < self.burst:
            return
        while self.in_flight + len(self.batches) < self.settings.prefetch and self._may_draw(self.next_draw):
            self._ask_for(self.next_draw)
            self.next_draw += 1
            self.in_flight += 1

    def _may_draw(self, draw: int) -> bool:
        return self.rounds is None or draw < self.rounds.due_draws

    def _ask_for(self, draw: int) -> None:
        assert self.token is not None
        rows = self.unsent.popleft()[1] if self.unsent else None
        lent = self.trays.lend()
        self.replay.ask(
            SampleRequest(
                token=self.token,
                draw=draw,
                batch_size=self.settings.batch_size,
                beta=beta_at(self.settings.priority, draw),
                tray=None if lent is None else lent.tray,
            ),
            rows,
            on_reply=lambda received: self._on_batch(received, lent),
            on_failure=lambda error: self._on_no_batch(draw, error, lent),
            timeout_s=SAMPLE_TIMEOUT_S,
            retry_s=SAMPLE_RETRY_S,
            once=WITHOUT_TRAY,
        )

    def _on_batch(self, received: Received, lent: LentTray | None) -> None:
        batch = expect(received.message, Batch)
        self.in_flight -= 1
        self.batches.append((batch.draw, self._rows_of(batch, received, lent)))

    def _rows_of(self, batch: Batch, received: Received, lent: LentTray | None) -> Arrays:
        """Where they came: on the tray that was lent for them, or through the socket."""
        if lent is not None and batch.on_tray:
            return self.trays.take_back(lent, batch.on_tray)
        if lent is not None:
            self.trays.leave(lent)
        if batch.no_tray:
            self.trays.give_up(batch.no_tray)
        self.trays.note_size(received.arrays)
        return received.arrays

    def _on_no_batch(self, draw: int, error: RookeryError, lent: LentTray | None) -> None:
        if lent is not None:
            self.trays.leave(lent)
        if isinstance(error, StaleToken) or lost_its_place(error):
            raise error
        if isinstance(error, Refused) and error.code != "deadline":
            log.warning("no batch; asking again in a moment", reason=str(error))
            # At once would be refused at once again.
            self.loop.after(REFUSED_PAUSE_S, lambda: self._give_up_draw(draw))
            return
        self._give_up_draw(draw)

    def _give_up_draw(self, draw: int) -> None:
        """The next draw will do as well; but in lockstep there is no other."""
        if self.rounds is not None:
            self._ask_for(draw)
        else:
            self.in_flight -= 1

    # --- publishing and checkpoints ---------------------------------------------------------------------

    def _publish_if_changed(self) -> None:
        if self.active and self.algorithm.updates != self.published_updates:
            self._publish()

    def _publish(self) -> None:
        """Sends the weights unless the last ones are still on their way; newer ones go with the next."""
        if self.publishing:
            return
        assert self.token is not None
        self.publishing = True
        arrays = self._policy_arrays()
        publish_id = uuid.uuid4().hex if self.rounds is None else f"phase-{self.rounds.number}"
        message = Publish(token=self.token, publish_id=publish_id, updates=self.published_updates)
        self.params.ask(
            message,
            arrays,
            on_reply=self._on_published,
            on_failure=self._on_not_published,
            timeout_s=10.0,
        )

    def _publish_first(self) -> None:
        """Version 1 of a run in rounds; every other version is made by a phase."""
        assert self.token is not None
        message = Publish(token=self.token, publish_id="first", updates=0)
        received = self.params.call(message, self._policy_arrays(), timeout_s=30.0)
        self.version = expect(received.message, Published).version

    def _policy_arrays(self) -> dict[str, Array]:
        """The weights of this moment; `published_updates` says which they are."""
        with self.trainer.reading():
            self.published_updates, policy = self.algorithm.updates, self.algorithm.policy()
        return {name: tensor.numpy() for name, tensor in finite(policy).items()}

    def _on_published(self, received: Received) -> None:
        self.publishing = False
        self.version = expect(received.message, Published).version
        if self.rounds is not None:
            self.permit.give_back()
            self.rounds.on_published()

    def _on_not_published(self, error: RookeryError) -> None:
        self.publishing = False
        self.published_updates = -1  # so that the next turn of the timer tries again
        if isinstance(error, StaleToken):
            raise error
        log.warning("weights not published yet", reason=str(error))
        if self.rounds is not None:  # there is no timer: a phase ends with its publishing
            self.loop.after(REFUSED_PAUSE_S, self._publish)

    def _checkpoint(self) -> None:
        if not self.uploader.busy and self.active:
            self.uploader.start(self._packed())

    def _packed(self) -> bytes:
        # Draws in flight were not trained on: a resumed learner asks for them again.
        with self.trainer.reading():
            untrained = self.in_flight + len(self.batches) + self.trainer.untrained
            tensors = self.algorithm.checkpoint()
        counters = {"next_draw": self.next_draw - untrained}
        if self.rounds is not None:
            counters["rounds"] = self.rounds.number
        return pack(finite(tensors), counters)

    def on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        """A lease that was given to somebody else, or given back in our name, does not come back."""
        if self.ready and not reply.lease_held and not self.loop.stopping:
            raise StaleToken("the parameter server says that this learner's lease is gone")

    # --- the end ----------------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """A last publish and a last checkpoint, if the parameter server answers in time."""
        if self.rounds is not None:  # the notice that all is trained may overtake the answer that says so
            self.loop.turn_until(lambda: not self.publishing, LAST_WORDS_S)
        if self.rounds is not None and not self.rounds.at_boundary:
            log.warning("ended in the middle of a phase: without a checkpoint the run cannot be resumed")
            return
        self._end_updates()
        deadline = time.monotonic() + LAST_WORDS_S
        self._drop_sample_requests()
        while self.uploader.busy and time.monotonic() < deadline:
            self.params.flush(0.1)
        try:
            self._hand_over()
        except TrainingFailed as error:
            log.warning("nothing of this is kept; the last good checkpoint is", reason=str(error))
        if not self.params.flush(max(0.5, deadline - time.monotonic())):
            log.warning("the parameter server did not take the last checkpoint in time")

    def _hand_over(self) -> None:
        if not self.uploader.busy:
            self.uploader.start(self._packed())
        if self.rounds is None and self.algorithm.updates != self.published_updates:
            self._publish()

    def close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()
        if self.ready:
            self.trainer.stop(CLOSE_S)
            self.trays.close()
        super().close()

    def _end_updates(self) -> None:
        deadline_s = self.settings.update_deadline_s
        if not self.trainer.stop(deadline_s):
            raise Stuck(f"a gradient worker's last update did not end in {deadline_s:g} s")
        self._take_trained()

    def _drop_sample_requests(self) -> None:
        self._flush_priorities()
        self.replay.close()
        self.in_flight += len(self.batches)  # they were drawn and not trained on: the checkpoint says so
        self.batches.clear()

    def metrics(self) -> dict[str, float]:
        if not self.ready:
            return {}
        own = {
            "updates": float(self.algorithm.updates),
            "skipped_updates": float(self.algorithm.skipped),
            "version": float(self.version),
            "beta": beta_at(self.settings.priority, self.next_draw),
            "checkpoints": float(self.uploader.completed),
            "tray_batches": float(self.trays.batches),
            "repeats": float(self.replay.counters["repeats"] + self.params.counters["repeats"]),
        }
        return own | self.trainer.metrics() | self.figures.take()
