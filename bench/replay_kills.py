"""`make soak-replay`: kills a replay service at random moments under full load and proves its files.

Actors push segments of their own contents, a learner draws and updates, and the service is ended with SIGKILL
again and again. After each death, before the restart, the files are opened and compared with what the actors
made: every acknowledged segment that was not overwritten since is there byte for byte, none is there twice,
none is damaged. Then the service starts again, and the time to its first served batch is taken.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import progress
from bench.replay_alone import (
    FLAT,
    SEGMENT_STEPS,
    Actor,
    Learner,
    ReplayProcess,
    Stream,
    fill,
    make_buffer,
    make_config,
)
from bench.replay_links import SPAWN, end, start
from services.replay.records import incarnation_text
from services.replay.ring import Ring
from services.replay.streams import Streams
from shared.codec import pack_segment
from shared.config import Config

AGENT = "agent_0"


@dataclass
class Outcome:
    """What a run of kills found. `problems` must be empty."""

    kills: int = 0
    segments_stored: int = 0
    segments_compared: int = 0
    restarts_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        slowest = max(self.restarts_s, default=0.0)
        median = float(np.median(self.restarts_s)) if self.restarts_s else 0.0
        return (
            f"{self.kills} kills, {self.segments_stored:,} segments stored, {self.segments_compared:,} "
            f"compared byte for byte; start to first batch: median {median:.2f} s, slowest {slowest:.2f} s; "
            f"{len(self.problems)} problems"
        )


def act(config: Config, stream: Stream, acknowledged: Any) -> None:
    """A process: one actor for as long as it is let."""

    def note(sequence: int) -> None:
        acknowledged.value = sequence

    actor = Actor(config, stream, distinct=True, on_acknowledged=note)
    while True:
        actor.run(1.0)


def learn(config: Config) -> None:
    """A process: one learner for as long as it is let."""
    learner = Learner(config, AGENT, 256)
    while True:
        learner.run(1.0)


def run_kills(directory: Path, kills: int, *, capacity_steps: int, actors: int = 3, seed: int = 0) -> Outcome:
    """Loads, kills, proves, restarts; `kills` times."""
    chance, outcome = random.Random(seed), Outcome()
    config = make_config("tcp", directory, agents=1, capacity_steps=capacity_steps)
    fill(make_buffer(directory / "replay" / AGENT, AGENT, config))
    streams = [Stream(AGENT, number) for number in range(1, actors + 1)]
    acknowledged = [SPAWN.Value("q", 0, lock=False) for _ in streams]
    files = Files(directory / "replay" / AGENT, config, streams)
    replay = ReplayProcess(directory, config)
    replay.start()
    load = [start(act, config, *pair) for pair in zip(streams, acknowledged, strict=True)]
    load.append(start(learn, config))
    probe = Learner(config, AGENT, 16, in_flight=0, updates=False, first_draw=2**40)
    try:
        probe.first_batch(60.0)
        wait_for_load(acknowledged, 60.0)
        for number in range(kills):
            time.sleep(chance.uniform(0.0, 0.6))  # the random moment
            replay.kill()
            promised = [value.value for value in acknowledged]
            outcome.problems += [
                f"kill {number + 1}: {problem}" for problem in files.prove(promised, outcome)
            ]
            began = time.perf_counter()
            replay.start()
            probe.first_batch(60.0)
            outcome.restarts_s.append(time.perf_counter() - began)
            outcome.kills += 1
            wait_for_load(acknowledged, 60.0, above=promised)
            progress(str(outcome))
    finally:
        probe.close()
        end(load)
        replay.stop()
    return outcome


def wait_for_load(acknowledged: Sequence[Any], timeout_s: float, above: Sequence[int] | None = None) -> None:
    """Until every actor has more acknowledged than then."""
    floor = above or [0] * len(acknowledged)
    deadline = time.monotonic() + timeout_s
    while not all(value.value > least for value, least in zip(acknowledged, floor, strict=True)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"actors stand still at {[value.value for value in acknowledged]}")
        time.sleep(0.02)


class Files:
    """The ring of a service that is dead."""

    def __init__(self, directory: Path, config: Config, streams: Sequence[Stream]) -> None:
        self._directory, self._config = directory, config
        self._streams = {stream.incarnation: stream for stream in streams}
        self._order = [stream.incarnation for stream in streams]
        self._compared: set[tuple[str, int]] = set()

    def prove(self, promised: Sequence[int], outcome: Outcome) -> list[str]:
        """What is wrong, in words."""
        slots = -(-self._config.replay.capacity_steps // SEGMENT_STEPS)
        ring = Ring(self._directory, FLAT, slots, SEGMENT_STEPS, self._config.learner.n_step)
        marks = Streams(self._directory / "streams", now=0.0)
        valid = ring.valid_slots()
        marks.recover(ring.metadata[valid], now=0.0)  # as the service does when it comes back
        outcome.segments_stored = sum(marks.mark(incarnation) for incarnation in self._order)
        problems = []
        if ring.state["damaged_slots"]:
            problems.append(f"{ring.state['damaged_slots']} damaged slots")
        if len(valid) < slots - 1:
            problems.append(
                f"{len(valid)} of {slots} slots valid, where only the one being written may be missing"
            )
        places: dict[str, dict[int, int]] = {incarnation: {} for incarnation in self._order}
        found: Counter[tuple[str, int]] = Counter()
        for slot in valid.tolist():
            key = incarnation_text(ring.metadata["incarnation"][slot]), int(ring.metadata["sequence"][slot])
            found[key] += 1
            places.setdefault(key[0], {})[key[1]] = slot
        problems += [f"{key} stored {times} times" for key, times in found.items() if times > 1]
        for incarnation, promise in zip(self._order, promised, strict=True):
            problems += _gaps(places[incarnation], marks.mark(incarnation), promise)
            problems += self._differences(ring, incarnation, places[incarnation], outcome)
        return problems

    def _differences(
        self, ring: Ring, incarnation: str, places: dict[int, int], outcome: Outcome
    ) -> list[str]:
        """Compares what was not compared before, byte for byte, with what the actor made."""
        problems, stream = [], self._streams[incarnation]
        for sequence, slot in places.items():
            if (incarnation, sequence) in self._compared:
                continue
            self._compared.add((incarnation, sequence))
            outcome.segments_compared += 1
            made = pack_segment(FLAT, stream.arrays(sequence))
            if not np.array_equal(ring.slot_arrays(slot).block, made.block):
                problems.append(f"segment {sequence} of actor {stream.number} differs from what was made")
        return problems


def _gaps(places: dict[int, int], mark: int, promise: int) -> list[str]:
    """The ring keeps the newest: of a stream that must be all numbers from some number up to its mark."""
    problems = []
    if mark < promise:
        problems.append(f"{promise} was acknowledged, the mark is {mark}")
    if places and (max(places) != mark or len(places) != mark - min(places) + 1):
        problems.append(f"of {min(places)} to {mark} there are {len(places)} segments, up to {max(places)}")
    return problems


def main() -> int:
    """Prints what was found; 1 if anything was lost, doubled or damaged, or a restart took 2 s or more."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_kills", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--kills", type=int, default=200, help="how often (default: 200)")
    parser.add_argument("--steps", type=int, default=2**20, help="steps that are stored (default: 2^20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replay-kills-") as name:
        outcome = run_kills(Path(name), options.kills, capacity_steps=options.steps, seed=options.seed)
    progress("")
    print(outcome)
    for problem in outcome.problems[:50]:
        print(f"problem: {problem}")
    slow = [seconds for seconds in outcome.restarts_s if seconds >= 2.0]
    if slow:
        print(
            f"{len(slow)} restarts took 2 s or more: {', '.join(f'{seconds:.2f}' for seconds in slow[:20])}"
        )
    return 1 if outcome.problems or slow else 0


if __name__ == "__main__":
    sys.exit(main())
