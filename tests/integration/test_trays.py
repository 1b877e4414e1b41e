"""Batches through shared memory: real services that are asked twice, put to sleep and killed meanwhile."""

from __future__ import annotations

import signal
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash
from conftest import MakeRun
from local_run import PATIENCE_S, LocalRun
from waiting import wait_for

from bench.replay_alone import RUN, ReplayProcess, Stream, fill, make_buffer, make_config
from bench.replay_kills import AGENT, act
from bench.replay_links import SPAWN, end, start
from shared.codec import Received
from shared.config import Config
from shared.errors import PeerSilent, RookeryError
from shared.layout import Arrays
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.links.trays import SUPPORTED, LentTray, TrayLender
from shared.loop import Loop
from shared.messages import Batch, SampleRequest, Token, expect

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not SUPPORTED, reason="trays need Linux")]

BATCH = 64
KEPT = 3  # batches that are being "trained on" at any time


@dataclass
class Reader:
    """A learner that reads slowly: what it holds must never change, however often it asked for it."""

    config: Config
    silence_s: float = 0.3  # after which it gives a request up
    retry_s: float = 0.002  # so that nearly every request is repeated while replay is busy
    loop: Loop = field(default_factory=Loop)
    held: deque[tuple[Arrays, int]] = field(default_factory=deque)
    draw: int = 0
    given_up: int = 0
    through_socket: int = 0

    def __post_init__(self) -> None:
        self._network = Network.of(self.config, self.loop)
        self.link = RequestSender(
            self._network, self.config.endpoints.replay[0].requests, identity=uuid.uuid4().hex
        )
        self.link.run = RUN
        self.trays = TrayLender(12)

    def read(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            while self.link.waiting < 4:
                self._ask()
            self.loop.turn(block=True)
            self.link._repeat_and_expire()  # not only four times a second

    def read_until_more(self, batches: int) -> None:
        """Until so many more have come on trays."""
        wanted = self.trays.batches + batches
        wait_for(lambda: self.read(0.2) or self.trays.batches > wanted, "batches on trays", every_s=0.0)

    def _ask(self) -> None:
        lent = self.trays.lend()
        request = SampleRequest(
            token=Token(agent=AGENT, number=1),
            draw=self.draw,
            batch_size=BATCH,
            beta=0.4,
            tray=None if lent is None else lent.tray,
        )
        self.draw += 1
        self.link.ask(
            request,
            on_reply=lambda received: self._on_batch(received, lent),
            on_failure=lambda error: self._on_failure(error, lent),
            timeout_s=self.silence_s,
            retry_s=self.retry_s,
            once={"tray": None},
        )

    def _on_batch(self, received: Received, lent: LentTray | None) -> None:
        batch = expect(received.message, Batch)
        assert batch.no_tray == ""
        if lent is not None and batch.on_tray:
            arrays: Arrays = self.trays.take_back(lent, batch.on_tray)
        else:
            if lent is not None:
                self.trays.leave(lent)
            self.through_socket += 1
            self.trays.note_size(received.arrays)
            arrays = received.arrays
        assert_whole(arrays)
        self.held.append((arrays, digest(arrays)))
        if len(self.held) > KEPT:
            self.let_go()

    def let_go(self) -> None:
        arrays, seen = self.held.popleft()
        assert digest(arrays) == seen, "a batch changed while it was held"

    def _on_failure(self, error: RookeryError, lent: LentTray | None) -> None:
        assert isinstance(error, PeerSilent)
        self.given_up += 1
        if lent is not None:
            self.trays.leave(lent)

    def close(self) -> None:
        while self.held:
            self.let_go()
        self._network.close()
        self.loop.close()


def assert_whole(arrays: Arrays) -> None:
    """Every row is of one segment: its observation says which, and so does its version."""
    assert np.array_equal(arrays["observation"][:, 0, 0], (arrays["version"] % 251).astype(np.float32))
    assert len(arrays["index"]) == BATCH


def digest(arrays: Arrays) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(array.tobytes() for array in arrays.values()))


def test_batches_on_trays_are_whole_and_stay_so_through_repeats_sleep_and_death(tmp_path: Path) -> None:
    """A replay that is asked several times, sleeps past deadlines and dies never writes on what is read."""
    config = make_config("tcp", tmp_path, agents=1, capacity_steps=2**14, batch_size=BATCH)
    fill(make_buffer(tmp_path / "replay" / AGENT, AGENT, config))
    replay = ReplayProcess(tmp_path, config)
    replay.start()
    reader = Reader(config)
    load = [start(act, config, Stream(AGENT, 1), SPAWN.Value("q", 0, lock=False))]
    try:
        reader.read_until_more(100)
        for _ in range(4):
            assert replay.process is not None
            replay.process.send_signal(signal.SIGSTOP)
            reader.read(0.7)  # longer than it waits: requests are given up, their repeats pile up
            replay.process.send_signal(signal.SIGCONT)
            reader.read_until_more(50)
        for _ in range(2):
            replay.kill()
            reader.read(0.1)
            replay.start()
            reader.read_until_more(50)
    finally:
        reader.close()
        end(load)
        replay.stop()
    assert reader.given_up >= 16
    assert reader.link.counters["repeats"] > 100
    assert reader.through_socket < reader.trays.batches


def tray_batches(run: LocalRun) -> float:
    status = run.wait_until_known()
    return sum(service.metrics.get("tray_batches", 0.0) for service in status.services)


def least_updates(run: LocalRun) -> int:
    return min(agent.updates for agent in run.wait_until_known().agents.values())


def test_learners_of_a_local_run_get_their_batches_on_trays(make_run: MakeRun) -> None:
    """All but the first few; and after replay died, again."""
    run = make_run(param_server__lease_s=5)
    services = run.start_all()
    run.wait_until_training()
    wait_for(lambda: tray_batches(run) > 50, "batches on trays", PATIENCE_S)
    services["replay"].kill()
    services["replay"].wait(10)
    services["replay"] = run.start("replay")
    before = tray_batches(run)
    wait_for(lambda: tray_batches(run) > before + 50, "batches on trays again", PATIENCE_S)
    run.end_by_hand(services)


def test_learners_without_shared_memory_train_through_the_socket(make_run: MakeRun) -> None:
    """replay.shared_memory: false."""
    run = make_run(replay__shared_memory=False)
    services = run.start_all()
    run.wait_until_training()
    before = least_updates(run)
    wait_for(lambda: least_updates(run) > before + 50, "updates", PATIENCE_S)
    assert tray_batches(run) == 0
    run.end_by_hand(services)


def test_learner_with_one_batch_ahead_is_never_left_waiting_for_a_timer(make_run: MakeRun) -> None:
    """It asks for the next batch before it trains on the last one, so an answer always wakes it."""
    run = make_run(learner__prefetch=1, replay__samples_per_insert=1000)
    services = run.start_all()
    run.wait_until_training()
    before, began = least_updates(run), time.monotonic()
    wait_for(lambda: least_updates(run) > before + 200, "200 updates of each", PATIENCE_S)
    assert time.monotonic() - began < 200 * 0.1  # timers alone gave it less than ten a second
    run.end_by_hand(services)
