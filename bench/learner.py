"""`make bench-learner`: what one update costs, and what doing things at the same time gives, on this machine.

The whole pipeline (batches over the socket, priorities back, publishing, checkpoints) on one core, beside a
bare torch loop with the same network, batch and optimizer on a batch that is already in memory; the same with
uniform replay; gradient workers 1, 2 and 4; and whole runs of 3 agents, asynchronous beside sequential at
equal updates per step. Candidates take turns. Exits with 1 when a ratio misses its bar.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # before numpy

import torch

from bench.learner_alone import BATCH, BareLoop, TwoProcesses, UpdateAlone, WorkersAlone
from bench.learner_pipeline import Pipeline
from bench.learner_runs import Run, train_run
from bench.measure import Bar, Timing, calibration_s, progress, report, table

PACKAGES = ("rookery", "torch", "numpy", "numba", "pyzmq")
BARS = {
    "pipeline_over_bare": Bar("at least", 0.85),
    "workers_2_over_1": Bar("at least", 1.5),
    "async_over_sequential": Bar("at least", 1.6),
    "per_over_uniform": Bar("at most", 1.15),
}
WORKERS = (1, 2, 4)
SLICE_S = 2.0
RUN_STEPS = 400_000


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-learner-") as name:
        directory = Path(name)
        ratios, figures = measure_pipeline(directory, options.rounds)
        for more_ratios, more in (
            measure_workers(options.rounds),
            measure_runs(directory, options.runs),
        ):
            ratios |= more_ratios
            figures |= more
        return report("learner", {key: ratios[key] for key in BARS}, BARS, figures=figures, packages=PACKAGES)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.learner", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved slices of each (default: 7)")
    parser.add_argument("--runs", type=int, default=3, help="whole runs of each mode (default: 3)")
    parser.add_argument("--directory", type=Path, help="where runs lie meanwhile (default: a temporary one)")
    return parser.parse_args()


# --- one update through the whole pipeline ----------------------------------------------------------------


def measure_pipeline(directory: Path, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Learner, prioritized and uniform, and the bare loop, all on one and the same core."""
    core, other = max(os.sched_getaffinity(0)), min(os.sched_getaffinity(0))
    names = ["bare loop", "pipeline, prioritized", "pipeline, uniform", "our update, in memory"]
    timings = {name: Timing() for name in names}
    with Pipeline(directory / "pipeline", core=core, other=other) as pipeline:
        bare, alone = BareLoop(pipeline.spec), UpdateAlone(pipeline.spec)
        slices = {
            names[0]: lambda: bare.run(SLICE_S),
            names[1]: lambda: pipeline.run("prioritized", SLICE_S),
            names[2]: lambda: pipeline.run("uniform", SLICE_S),
            names[3]: lambda: alone.run(SLICE_S),
        }
        os.sched_setaffinity(0, {core})
        for number in range(rounds + 1):
            random.Random(number).shuffle(names)
            for name in names:
                before = calibration_s()
                updates, elapsed_s = slices[name]()
                calibration = (before + calibration_s()) / 2
                if number:  # the first round warms up
                    timings[name].raw_us.append(1e6 * elapsed_s / updates)
                    timings[name].calibrated.append(elapsed_s / updates / calibration)
            progress(f"pipeline: round {number} of {rounds}")
        os.sched_setaffinity(0, {core, other})
    rows = [["double DQN, MLP [128, 128], batch 256, one core", "us an update", "updates/s"]]
    rows += [[name, f"{timing.us:,.0f}", f"{timing.per_s:,.0f}"] for name, timing in sorted(timings.items())]
    table("one update", rows)
    ratios = {
        "pipeline_over_bare": timings["bare loop"].over(timings["pipeline, prioritized"]),
        "per_over_uniform": timings["pipeline, prioritized"].over(timings["pipeline, uniform"]),
    }
    return ratios, {"update_us": {name: round(timing.us, 1) for name, timing in timings.items()}}


# --- gradient workers -------------------------------------------------------------------------------------


def measure_workers(rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Updates/s of 1, 2 and 4 workers, of one worker with two threads, and of two separate processes."""
    candidates = {f"{count} workers": WorkersAlone(count, threads=1) for count in WORKERS}
    candidates["1 worker, 2 threads"] = WorkersAlone(1, threads=2)
    two = TwoProcesses()
    rates: dict[str, list[float]] = {name: [] for name in [*candidates, "two processes (the hardware)"]}
    for number in range(rounds):
        order = list(rates)
        random.Random(number).shuffle(order)
        for name in order:
            run = candidates[name].run if name in candidates else two.run
            rates[name].append(run(SLICE_S))
        progress(f"workers: round {number + 1} of {rounds}")
    contention = {name: candidate.contention() for name, candidate in candidates.items()}
    for candidate in candidates.values():
        candidate.close()
    two.close()
    median = {name: statistics.median(values) for name, values in rates.items()}
    rows = [["MLP [512, 512], batch 2048", "updates/s", "over 1 worker", "contention"]]
    for name, rate in median.items():
        ratio = _paired(rates[name], rates["1 workers"])
        rows.append([name, f"{rate:.1f}", f"{ratio:.2f}", contention.get(name, "-")])
    table("gradient workers", rows)
    figures = {"workers_updates_per_s": {name: round(rate, 2) for name, rate in median.items()}}
    return {"workers_2_over_1": _paired(rates["2 workers"], rates["1 workers"])}, figures


def _paired(mine: list[float], theirs: list[float]) -> float:
    """The median over the rounds of one rate over the other of the same round."""
    return statistics.median(one / other for one, other in zip(mine, theirs, strict=True))


# --- whole runs -------------------------------------------------------------------------------------------


def measure_runs(directory: Path, runs: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Epochs/s and updates/s of 3 agents in treasure hunt; the smaller of the two ratios counts."""
    modes = {
        "asynchronous": ["--mode", "async"],
        "sequential": ["--mode", "sequential"],
        "sequential, 2 threads": ["--mode", "sequential", "--set", "learner.threads=2"],
    }
    done: dict[str, list[Run]] = {mode: [] for mode in modes}
    for number in range(runs):
        order = list(modes)
        random.Random(number).shuffle(order)
        for mode in order:
            progress(f"runs: {mode}, {number + 1} of {runs}")
            path = directory / f"{mode.replace(', ', '-').replace(' ', '-')}-{number}"
            done[mode].append(train_run(path, RUN_STEPS, modes[mode]))
    rows = [["3 agents, treasure hunt", "epochs/s", "updates/s an agent", "updates a step"]]
    for mode, results in done.items():
        rows.append([mode, *(f"{statistics.median(values):.4g}" for values in zip(*results, strict=True))])
    table("whole runs", rows)
    ratios = {
        key: _paired(*([getattr(run, key) for run in done[mode]] for mode in ("asynchronous", "sequential")))
        for key in ("epochs_per_s", "updates_per_s")
    }
    figures = {
        "runs": {mode: [run._asdict() for run in results] for mode, results in done.items()},
        "async_over_sequential": {key: round(value, 3) for key, value in ratios.items()},
        "batch": BATCH,
    }
    return {"async_over_sequential": min(ratios.values())}, figures


if __name__ == "__main__":
    sys.exit(main())
