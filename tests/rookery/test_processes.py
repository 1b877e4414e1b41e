from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.processes import Child, Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.end(0.0)


def waits(processes: Processes, lived_s: float, failed: bool, times: int) -> list[float]:
    """How long the next starts wait if the process lives this long each time."""
    child = Child("learner-0", "services.learner", [])
    planned = []
    for _ in range(times):
        child.started = time.monotonic() - lived_s
        planned.append(processes.start_again(child, failed))
    return planned


def test_process_that_fails_again_and_again_waits_longer_each_time(processes: Processes) -> None:
    """Up to half a minute, even if its start takes long: a failure must not eat the others' time."""
    expected = [0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert waits(processes, lived_s=15.0, failed=True, times=9) == pytest.approx(expected)


def test_process_that_is_killed_again_and_again_waits_for_seconds_at_most(processes: Processes) -> None:
    """It did nothing wrong."""
    assert waits(processes, lived_s=1.0, failed=False, times=6) == pytest.approx(
        [0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    )


@pytest.mark.parametrize(("lived_s", "failed"), [(11.0, False), (61.0, True)])
def test_process_that_lived_long_is_started_again_at_once(
    processes: Processes, lived_s: float, failed: bool
) -> None:
    """What happens rarely need not wait."""
    assert waits(processes, lived_s, failed, times=3) == [0.0, 0.0, 0.0]
