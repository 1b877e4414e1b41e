"""Fixtures of the integration tests; the helper module beside the tests becomes importable."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # first: the tests here also import from this conftest

from local_run import LocalRun

MakeRun = Callable[..., LocalRun]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Makes small local runs; whatever their processes are doing, none outlives the test."""
    runs: list[LocalRun] = []

    def make(**settings: Any) -> LocalRun:
        runs.append(LocalRun(tmp_path / f"run-{len(runs)}", settings))
        return runs[-1]

    yield make
    for run in runs:
        sys.stdout.write(run.tails())  # pytest shows it if the test failed
        run.kill_everything()
