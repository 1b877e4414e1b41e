"""How every benchmark here measures: candidates take turns in short slices, and only ratios count.

The speed of a core flips by a factor of two on shared machines. So candidates are interleaved in an order
that changes from round to round, a small fixed calibration loop runs beside each slice, times are divided by
it, and medians over the rounds are compared.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

RESULTS = Path(__file__).parent / "results"

Call = Callable[[int], object]  # called with a number that never repeats


def calibration_s() -> float:
    """Seconds for a fixed piece of work: some Python, some arithmetic, some memory."""
    values = np.arange(65_536, dtype=np.float64)
    started = time.perf_counter()
    total = 0
    for i in range(20_000):
        total += i & 7
    for _ in range(20):
        np.add(values, 1.0, out=values)
    return time.perf_counter() - started


@dataclass
class Timing:
    """One candidate: microseconds a call in each round, and the same against the calibration beside it."""

    raw_us: list[float] = field(default_factory=list)
    calibrated: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        return statistics.median(self.raw_us)

    @property
    def per_s(self) -> float:
        return 1e6 / self.us

    def over(self, other: Timing) -> float:
        """How many times the other's time this takes, calibrated, median of the rounds."""
        pairs = zip(self.calibrated, other.calibrated, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def interleave(candidates: Mapping[str, Call], *, rounds: int, slice_s: float) -> dict[str, Timing]:
    """Times all candidates, each once a round, in an order that changes."""
    order, numbers = list(candidates), dict.fromkeys(candidates, 0)
    shuffle = random.Random(0).shuffle
    timings = {name: Timing() for name in candidates}
    for name, call in candidates.items():  # compiling, first touches
        numbers[name] = _run_slice(call, 0, slice_s)[0]
    for number in range(rounds):
        shuffle(order)
        for name in order:
            before = calibration_s()
            numbers[name], calls, elapsed_s = _run_slice(candidates[name], numbers[name], slice_s)
            calibration = (before + calibration_s()) / 2
            timings[name].raw_us.append(1e6 * elapsed_s / calls)
            timings[name].calibrated.append(elapsed_s / calls / calibration)
        progress(f"round {number + 1} of {rounds}")
    return timings


def _run_slice(call: Call, number: int, slice_s: float) -> tuple[int, int, float]:
    calls, started = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started) < slice_s:
        for _ in range(10):
            call(number + calls)
            calls += 1
    return number + calls, calls, elapsed_s


def progress(text: str) -> None:
    """On a terminal one line that is written over; elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bar:
    """What a ratio must reach."""

    kind: Literal["at least", "at most"]
    value: float

    def holds(self, ratio: float) -> bool:
        return ratio >= self.value if self.kind == "at least" else ratio <= self.value


def table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """A table for people; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    progress("")
    print(f"\n{title}")
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  " + "  ".join(cells))


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "",
    )
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; what is not installed is not there."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report(
    name: str,
    ratios: Mapping[str, float],
    bars: Mapping[str, Bar],
    *,
    figures: Mapping[str, Any],
    packages: Sequence[str],
    notes: Sequence[str] = (),
) -> int:
    """Prints the ratios beside their bars, writes results/NAME.json; the exit code: 1 if one misses."""
    missed = [key for key, bar in bars.items() if not bar.holds(ratios[key])]
    rows = [["ratio", "measured", "must be", ""]]
    for key, value in ratios.items():
        bar = bars[key]
        rows.append([key, f"{value:.3f}", f"{bar.kind} {bar.value:g}", "MISSED" if key in missed else "ok"])
    table("ratios", rows)
    for note in notes:
        print(f"note: {note}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(packages),
        "ratios": {key: round(value, 4) for key, value in ratios.items()},
        "bars": {key: f"{bar.kind} {bar.value:g}" for key, bar in bars.items()},
        "missed": missed,
        "figures": figures,
        "notes": list(notes),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path}")
    return 1 if missed else 0
