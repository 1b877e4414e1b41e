from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from services.learner.contention import SAY_AGAIN_S, Contention, Waits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(contention: Contention, clock: Clock, *waits: Waits) -> tuple[dict[str, float], list[str]]:
    """A second of updates and a heartbeat: its figures, and the levels of what was logged."""
    for each in waits:
        contention.add(each)
    clock.now += 1.0
    with capture_logs() as lines:
        figures = contention.take()
    return figures, [line["log_level"] for line in lines]


def test_waits_become_means_of_each_worker_and_of_all() -> None:
    """Read wait, write wait and wait / (wait + work), since the last heartbeat only."""
    clock = Clock()
    contention = Contention(2, clock)
    waits = [Waits(0, 0.001, 0.002, 0.007), Waits(0, 0.003, 0.0, 0.007), Waits(1, 0.0, 0.004, 0.036)]
    figures, lines = beat(contention, clock, *waits)
    assert figures == pytest.approx(
        {
            "worker.0.read_wait_ms": 2.0,
            "worker.0.write_wait_ms": 1.0,
            "worker.0.contention": 0.3,
            "worker.1.read_wait_ms": 0.0,
            "worker.1.write_wait_ms": 4.0,
            "worker.1.contention": 0.1,
            "read_wait_ms": 4 / 3,
            "write_wait_ms": 2.0,
            "contention": 0.010 / 0.060,
            "contention_alarms": 0.0,
        }
    )
    assert lines == []
    figures, _lines = beat(contention, clock, Waits(1, 0.0, 0.0, 0.1))
    assert figures["worker.1.contention"] == 0.0
    assert figures["worker.0.contention"] == pytest.approx(0.3)  # the last known stands
    assert figures["contention"] == 0.0


def test_second_question_at_once_takes_nothing_away() -> None:
    """A person's question between two heartbeats does not split their means."""
    clock = Clock()
    contention = Contention(1, clock)
    first, _lines = beat(contention, clock, Waits(0, 0.001, 0.0, 0.001))
    contention.add(Waits(0, 0.0, 0.0, 0.001))
    assert contention.take() == first
    clock.now += 1.0
    assert contention.take()["contention"] == 0.0


def test_mean_wait_over_ten_milliseconds_is_a_warning() -> None:
    """Both locks together; ten milliseconds is still quiet."""
    clock = Clock()
    contention = Contention(1, clock)
    assert beat(contention, clock, Waits(0, 0.005, 0.0049, 0.1))[1] == []
    assert beat(contention, clock, Waits(0, 0.006, 0.0041, 0.1))[1] == ["warning"]


def test_ratio_over_one_half_is_an_alarm_and_counted() -> None:
    """However short the waits are; one half is still quiet."""
    clock = Clock()
    contention = Contention(1, clock)
    assert beat(contention, clock, Waits(0, 0.001, 0.0, 0.001))[1] == []
    figures, lines = beat(contention, clock, Waits(0, 0.0011, 0.0, 0.001))
    assert lines == ["error"]
    assert figures["contention_alarms"] == 1.0


def test_alarm_that_goes_on_is_counted_each_time_and_said_once_a_minute() -> None:
    """A log must not fill up; the counter tells how long it went on."""
    clock = Clock()
    contention = Contention(1, clock)
    said = [beat(contention, clock, Waits(0, 0.02, 0.0, 0.01))[1] for _ in range(int(SAY_AGAIN_S) + 1)]
    assert said[0] == said[-1] == ["error"]
    assert not any(said[1:-1])
    assert beat(contention, clock, Waits(0, 0.02, 0.0, 0.01))[0]["contention_alarms"] == SAY_AGAIN_S + 2


def test_quiet_workers_keep_their_last_figures() -> None:
    """Nothing trained is not the same as no waiting."""
    clock = Clock()
    contention = Contention(1, clock)
    assert contention.take() == {"contention_alarms": 0.0}
    figures, _lines = beat(contention, clock, Waits(0, 0.001, 0.0, 0.003))
    assert beat(contention, clock)[0] == figures
