"""`make bench-replay`: Rookery's replay beside other libraries and beside bare sockets, on this machine.

2^20 steps of float32[128]. In process, one core: drawing a batch and updating its priorities, beside cpprb
and tianshou doing the same; gathering alone; the same without priorities; a whole DQN update with and without
them. Over sockets: the service with one learner beside a bare ROUTER/DEALER echo of the same size, eight
actors beside a bare PUSH/PULL, and three learners with eight actors at once. Exits with 1 when a ratio misses
its bar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # before numpy

import numpy as np
import torch

from bench import replay_links
from bench.measure import Bar, Timing, interleave, progress, report, table
from bench.replay_alone import (
    FLAT,
    SEGMENT_STEPS,
    Actor,
    Learner,
    ReplayProcess,
    Stream,
    fill,
    framed,
    make_buffer,
    make_config,
)
from bench.replay_peers import BETA, LEFT_OUT, PEERS, Peer
from rookery.run_directory import free_ports
from services.learner.algorithms import build_algorithm
from services.replay.buffer import AgentBuffer
from shared.config import Config, LearnerConfig
from shared.layout import Packed
from shared.specs import AgentSpec, Discrete, DType, vector_observation

CAPACITY = 2**20
SIZES = (256, 512)
IN_FLIGHT = 4
ACTORS, LEARNERS = 8, 3
PRIORITY_SETS = 4096
PACKAGES = ("rookery", "numpy", "numba", "pyzmq", "torch", "cpprb", "tianshou")
BARS = {
    "in_process_256": Bar("at least", 3.5),
    "in_process_512": Bar("at least", 3.0),
    "cycle_over_gather_512": Bar("at most", 2.2),
    "tcp_512": Bar("at least", 0.6),
    "insert_tcp": Bar("at least", 0.5),
    "per_over_uniform_buffer": Bar("at most", 1.9),
    "per_over_uniform_step": Bar("at most", 1.15),
    "gib_f32": Bar("at most", 0.65),
    "gib_stack": Bar("at most", 0.2),
}

Array = np.ndarray[Any, Any]


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-replay-") as name:
        directory = Path(name)
        ratios, figures = measure_in_process(directory, options.rounds)
        over_sockets, more = measure_service(directory, options.rounds)
        ratios |= over_sockets | measure_memory(directory)
        return report(
            "replay",
            {key: ratios[key] for key in BARS},
            BARS,
            figures=figures | more,
            packages=PACKAGES,
            notes=[LEFT_OUT],
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=9, help="interleaved rounds of each comparison (default: 9)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the replay files lie meanwhile, about 3 GB (default: a temporary one)",
    )
    return parser.parse_args()


# --- in process -------------------------------------------------------------------------------------------


def measure_in_process(directory: Path, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    with one_core():
        torch.set_num_threads(1)
        progress("filling the buffers")
        buffer, uniform = open_buffers(directory)
        peers = {name: make(observations()) for name, make in PEERS.items()}
        cycles = {}
        for size in SIZES:
            cycles[size] = measure_cycles(buffer, uniform, peers, size, rounds)
        steps = measure_steps(buffer, uniform, rounds)
    best = {size: min(PEERS, key=lambda name, size=size: cycles[size][name].us) for size in SIZES}
    ratios = {f"in_process_{size}": cycles[size][best[size]].over(cycles[size]["rookery"]) for size in SIZES}
    ratios["cycle_over_gather_512"] = cycles[512]["rookery"].over(cycles[512]["rookery, gathering only"])
    ratios["per_over_uniform_buffer"] = cycles[512]["rookery"].over(cycles[512]["rookery, uniform"])
    ratios["per_over_uniform_step"] = steps["prioritized"].over(steps["uniform"])
    show_cycles(cycles)
    print_steps(steps)
    figures = {f"in_process_{size}_us": _us(cycles[size]) for size in SIZES} | {"dqn_step_256_us": _us(steps)}
    return ratios, figures


@contextmanager
def one_core() -> Iterator[None]:
    """This process on one core of those it may use."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def open_buffers(directory: Path) -> tuple[AgentBuffer, AgentBuffer]:
    """One with priorities, one without (alpha 0)."""
    config = make_config("tcp", directory, agents=1, capacity_steps=CAPACITY)
    flat = config.model_copy(update={"learner": LearnerConfig(n_step=1, priority={"alpha": 0.0})})
    made = []
    for name, settings in (("prioritized", config), ("uniform", flat)):
        buffer = make_buffer(directory / name, "agent_0", settings)
        fill(buffer)
        made.append(buffer)
    return made[0], made[1]


def observations() -> Array:
    return np.random.default_rng(0).random((CAPACITY, 128), dtype=np.float32)


def measure_cycles(
    buffer: AgentBuffer, uniform: AgentBuffer, peers: dict[str, Peer], size: int, rounds: int
) -> dict[str, Timing]:
    rng = np.random.default_rng(size)
    priorities = rng.exponential(size=(PRIORITY_SETS, size)).astype(np.float32)
    wide = priorities.astype(np.float64)
    index = np.sort(rng.integers(0, CAPACITY, (PRIORITY_SETS, size)), axis=1)

    def cycle(number: int) -> None:
        batch = buffer.draw(number, size, BETA)
        buffer.update_priorities(batch["index"], batch["generation"], priorities[number % PRIORITY_SETS])

    candidates: dict[str, Any] = {
        "rookery": cycle,
        "rookery, gathering only": lambda number: buffer.rows(index[number % PRIORITY_SETS]),
        "rookery, uniform": lambda number: uniform.draw(number, size, BETA),
    }
    for name, peer in peers.items():
        candidates[name] = lambda number, peer=peer: peer.cycle(size, wide[number % PRIORITY_SETS])
        candidates[f"{name}, uniform"] = lambda _number, peer=peer: peer.uniform(size)
    return interleave(candidates, rounds=rounds, slice_s=0.3)


def measure_steps(buffer: AgentBuffer, uniform: AgentBuffer, rounds: int) -> dict[str, Timing]:
    """A whole DQN update, MLP [128, 128], batch 256, with the buffer in the same process."""
    settings = LearnerConfig(n_step=1)
    learners = [build_algorithm(FLAT, settings, torch.device("cpu"), seed) for seed in (0, 1)]

    def prioritized(number: int) -> None:
        batch = buffer.draw(number, 256, BETA)
        done = learners[0].update(batch)
        if done is None:
            raise RuntimeError("the update was skipped")
        buffer.update_priorities(batch["index"], batch["generation"], done.priorities)

    def plain(number: int) -> None:
        learners[1].update(uniform.draw(number, 256, BETA))

    return interleave({"prioritized": prioritized, "uniform": plain}, rounds=rounds, slice_s=0.5)


def show_cycles(cycles: dict[int, dict[str, Timing]]) -> None:
    rows = [["", *(f"{size} rows: us" for size in SIZES), *(f"{size}: /s" for size in SIZES)]]
    for name in cycles[SIZES[0]]:
        timings = [cycles[size][name] for size in SIZES]
        rows.append([name, *(f"{t.us:,.1f}" for t in timings), *(f"{t.per_s:,.0f}" for t in timings)])
    table("in process, one core: a prioritized draw and its update, unless it says otherwise", rows)


def print_steps(steps: dict[str, Timing]) -> None:
    rows = [["", "us", "/s"], *([name, f"{t.us:,.0f}", f"{t.per_s:,.0f}"] for name, t in steps.items())]
    table("a whole DQN update of 256 rows, replay included", rows)


def _us(timings: dict[str, Timing]) -> dict[str, float]:
    return {name: round(timing.us, 2) for name, timing in timings.items()}


# --- over sockets -----------------------------------------------------------------------------------------


def measure_service(directory: Path, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    files = directory / "service"
    prepare_service_files(files)
    for transport in ("tcp", "ipc"):
        progress(f"one learner over {transport}")
        found = measure_one_learner(transport, files, rounds)
        figures[f"{transport}_512_per_s"] = {name: round(statistics.median(v)) for name, v in found.items()}
        if transport == "tcp":
            ratios["tcp_512"] = _ratio(found["rookery"], found["bare echo"])
    show_rates("one learner, 512 rows, 4 requests in flight: answers/s", figures)
    progress("eight actors")
    inserts = measure_inserts(files, rounds)
    ratios["insert_tcp"] = _ratio(inserts["rookery"], inserts["bare push"])
    figures["insert_tcp_per_s"] = {name: round(statistics.median(v)) for name, v in inserts.items()}
    progress("three learners and eight actors")
    figures["mixed"] = measure_mixed(files)
    show_inserts(figures)
    return ratios, figures


def prepare_service_files(files: Path) -> None:
    config = make_config("tcp", files, agents=LEARNERS, capacity_steps=CAPACITY)
    for number in range(LEARNERS):
        fill(make_buffer(files / "replay" / f"agent_{number}", f"agent_{number}", config))


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


@contextmanager
def service(transport: str, files: Path) -> Iterator[Config]:
    config = make_config(transport, files, agents=LEARNERS, capacity_steps=CAPACITY)
    replay = ReplayProcess(files, config)
    replay.start()
    try:
        yield config
    finally:
        replay.stop()


def measure_one_learner(transport: str, files: Path, rounds: int) -> dict[str, list[float]]:
    """Answers/s of the service, without and with priorities coming back, through shared memory instead of the
    socket, and of a bare echo of their size."""
    port = free_ports(1)[0]
    bare = f"tcp://127.0.0.1:{port}" if transport == "tcp" else f"ipc://{files}/echo.sock"
    with service(transport, files) as config:
        echo = replay_links.start(replay_links.serve_echo, bare, batch_bytes(config))
        driven = {
            "rookery": replay_links.Driven(OneLearner, config, "agent_0", False, False),
            "rookery, with updates": replay_links.Driven(OneLearner, config, "agent_1", True, False),
            "rookery, on trays": replay_links.Driven(OneLearner, config, "agent_2", False, True),
            "bare echo": replay_links.Driven(replay_links.EchoClient, bare, IN_FLIGHT),
        }
        found: dict[str, list[float]] = {name: [] for name in driven}
        try:
            for number in range(rounds + 1):
                for name, each in driven.items():
                    rate = each.run(1.0)
                    if number:  # the first round warms up
                        found[name].append(rate)
        finally:
            replay_links.end([echo, *(each.process for each in driven.values())])
    return found


class OneLearner:
    """A learner that is measured, in a process of its own."""

    def __init__(self, config: Config, agent: str, updates: bool, trays: bool) -> None:
        self._learner = Learner(config, agent, 512, IN_FLIGHT, updates=updates, trays=trays)
        self._learner.first_batch(60.0)

    def run(self, seconds: float) -> float:
        rate = self._learner.run(seconds)
        self._learner.rest()
        return rate


def batch_bytes(config: Config) -> int:
    """The size of an answer: the header and the block of a batch of 512 rows."""
    with tempfile.TemporaryDirectory() as name:
        small = config.model_copy(
            update={"replay": config.replay.model_copy(update={"capacity_steps": 1024})}
        )
        buffer = make_buffer(Path(name), "agent_0", small)
        fill(buffer)
        batch: Packed = buffer.draw(0, 512, BETA)
        return batch.block.nbytes


def measure_inserts(files: Path, rounds: int) -> dict[str, list[float]]:
    """Segments/s that the service stores from eight actors, and messages/s of a bare PUSH/PULL."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    found: dict[str, list[float]] = {"rookery": [], "bare push": []}
    counted = replay_links.SPAWN.Value("q", 0, lock=False)
    bare_going, going = replay_links.SPAWN.Event(), replay_links.SPAWN.Event()
    with service("tcp", files) as config:
        size = segment_bytes()
        processes = [replay_links.start(replay_links.pull_forever, endpoint, counted)]
        for number in range(ACTORS):
            processes.append(replay_links.start(replay_links.push_forever, endpoint, size, bare_going))
            processes.append(replay_links.start(act, config, number, going))
        observer = Learner(config, "agent_0", 512)
        observer.first_batch(60.0)
        try:
            for number in range(rounds + 1):
                rates = {
                    "bare push": rate_while(bare_going, lambda: counted.value),
                    "rookery": rate_while(going, lambda: inserted_steps(observer) / SEGMENT_STEPS),
                }
                for name, rate in rates.items():
                    if number:
                        found[name].append(rate)
        finally:
            replay_links.end(processes)
            observer.close()
    return found


def segment_bytes() -> int:
    return len(framed(Stream("agent_0", 1), 1).data)


def rate_while(going: Any, count: Any) -> float:
    """Sets them going, lets them find their pace, counts for a while, and stops them."""
    going.set()
    time.sleep(0.7)
    before, started = count(), time.perf_counter()
    time.sleep(1.5)
    rate = (count() - before) / (time.perf_counter() - started)
    going.clear()
    time.sleep(0.3)  # what is queued drains
    return float(rate)


def inserted_steps(observer: Learner) -> int:
    return sum(buffer.inserted_steps for buffer in observer.stats().buffers.values())


def act(config: Config, number: int, going: Any) -> None:
    """A process: one actor that pushes while `going` is set."""
    actor = Actor(config, Stream(f"agent_{number % LEARNERS}", number + 1))
    while True:
        going.wait()
        actor.run(0.1)


def learn(config: Config, number: int, going: Any) -> None:
    """A process: one learner that draws and updates while `going` is set."""
    learner = Learner(config, f"agent_{number}", 512, IN_FLIGHT)
    while True:
        going.wait()
        learner.run(0.1)


def measure_mixed(files: Path) -> dict[str, Any]:
    """What each agent's learner draws and its actors insert when all want as much as they can get."""
    going = replay_links.SPAWN.Event()
    with service("tcp", files) as config:
        processes = [replay_links.start(learn, config, number, going) for number in range(LEARNERS)]
        processes += [replay_links.start(act, config, ACTORS + number, going) for number in range(ACTORS)]
        observer = Learner(config, "agent_0", 512)
        observer.first_batch(60.0)
        try:
            going.set()
            time.sleep(2.0)
            before, started = observer.stats().buffers, time.perf_counter()
            time.sleep(5.0)
            after, elapsed_s = observer.stats().buffers, time.perf_counter() - started
        finally:
            replay_links.end(processes)
            observer.close()
    return {
        agent: {
            "batches_per_s": round(
                (after[agent].sampled_steps - before[agent].sampled_steps) / 512 / elapsed_s
            ),
            "inserted_steps_per_s": round(
                (after[agent].inserted_steps - before[agent].inserted_steps) / elapsed_s
            ),
        }
        for agent in after
    }


def show_rates(title: str, figures: dict[str, Any]) -> None:
    tcp, ipc = figures["tcp_512_per_s"], figures["ipc_512_per_s"]
    table(title, [["", "tcp", "ipc"], *([name, f"{tcp[name]:,}", f"{ipc[name]:,}"] for name in tcp)])


def show_inserts(figures: dict[str, Any]) -> None:
    rows = [["", "/s"], *([name, f"{rate:,}"] for name, rate in figures["insert_tcp_per_s"].items())]
    table(f"eight actors over tcp: segments of {SEGMENT_STEPS} steps", rows)
    rows = [["", "batches/s", "inserted steps/s"]]
    for agent, rates in figures["mixed"].items():
        rows.append([agent, f"{rates['batches_per_s']:,}", f"{rates['inserted_steps_per_s']:,}"])
    table("three learners (512 rows, with updates) and eight actors at once, over tcp", rows)


# --- memory -----------------------------------------------------------------------------------------------


def measure_memory(directory: Path) -> dict[str, float]:
    """GiB of 2^20 steps: files, tree and table of places."""
    config = make_config("tcp", directory, agents=1, capacity_steps=CAPACITY, n_step=3)
    stacked = AgentSpec(observation=vector_observation(125, DType.UINT8), stack=5, discrete=Discrete(n=4))
    found = {}
    for key, spec in (("gib_f32", FLAT), ("gib_stack", stacked)):
        place = directory / key
        buffer = make_buffer(place, "agent_0", config, spec)
        files = sum(path.stat().st_size for path in place.iterdir())
        found[key] = (files + buffer.ring.places.nbytes + buffer._tree.nbytes) / 2**30
    return found


if __name__ == "__main__":
    sys.exit(main())
