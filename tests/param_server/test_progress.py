from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.param_server.progress import Progress
from shared.errors import Refused
from shared.messages import EpochSummary

ONE, TWO = "1" * 32, "2" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress.jsonl"


@pytest.fixture
def progress(path: Path) -> Iterator[Progress]:
    with closing(Progress(path)) as opened:
        yield opened


def summary(number: int, epochs: int = 2, total: float = 3.0) -> EpochSummary:
    return EpochSummary(
        number=number, epochs=epochs, env_steps=epochs * 10, agent_steps=epochs * 20, return_sums={"a": total}
    )


def figures(progress: Progress) -> tuple[int, int, int, dict[str, float]]:
    totals = progress.totals
    return totals.epochs, totals.env_steps, totals.agent_steps, totals.return_sums


def test_summary_taken_is_one_line_and_counted(progress: Progress, path: Path) -> None:
    """The line says who played what, and when on the run's clock."""
    assert progress.take(ONE, 3, summary(1), 12.3456) == 1
    assert json.loads(path.read_text()) == {
        "t": 12.346,
        "actor": 3,
        "incarnation": ONE,
        "number": 1,
        "epochs": 2,
        "env_steps": 20,
        "agent_steps": 40,
        "return_sums": {"a": 3.0},
    }
    assert figures(progress) == (2, 20, 40, {"a": 3.0})


def test_summary_repeated_is_counted_once_also_after_a_restart(progress: Progress, path: Path) -> None:
    """A lost confirmation makes the actor repeat itself, to whoever listens now."""
    progress.take(ONE, 0, summary(1), 1)
    progress.take(ONE, 0, summary(2), 2)
    assert progress.take(ONE, 0, summary(2, epochs=99), 3) == 2
    assert progress.take(ONE, 0, summary(1, epochs=99), 3) == 2
    with closing(Progress(path)) as again:
        assert again.take(ONE, 0, summary(2, epochs=99), 3) == 2
        assert figures(again) == figures(progress) == (4, 40, 80, {"a": 6.0})
        assert again.take(ONE, 0, summary(3), 4) == 3
        assert again.last_taken(ONE) == 3


def test_summaries_of_two_incarnations_are_numbered_apart(progress: Progress) -> None:
    """An actor that starts anew begins with 1 again."""
    progress.take(ONE, 0, summary(1), 1)
    assert progress.take(TWO, 0, summary(1), 2) == 1
    assert progress.totals.epochs == 4
    assert progress.last_taken("3" * 32) == 0


def test_summary_after_a_gap_is_taken_and_said(progress: Progress) -> None:
    """What was confirmed and lost with a disk must not stop an actor's figures for ever."""
    with capture_logs() as logs:
        assert progress.take(ONE, 0, summary(5), 1) == 5
    assert [entry["event"] for entry in logs] == ["summaries_missing"]
    assert progress.take(ONE, 0, summary(4), 2) == 5


def test_recent_return_is_the_mean_over_the_newest_epochs(progress: Progress, path: Path) -> None:
    """Older epochs fade out; it is the same after a restart."""
    assert progress.recent_return("a") is None
    progress.take(ONE, 0, summary(1, epochs=0, total=0.0), 1)
    assert progress.recent_return("a") is None
    for number in range(2, 102):
        progress.take(ONE, 0, summary(number, epochs=10, total=-1000.0 if number < 82 else 10.0), 1)
    assert progress.recent_return("a") == 1.0
    assert progress.recent_return("a", epochs=10) == 1.0
    assert progress.recent_return("b") is None
    with closing(Progress(path)) as again:
        assert again.recent_return("a") == 1.0


def test_summary_with_a_return_that_is_no_number_keeps_the_averages_whole(
    progress: Progress, path: Path
) -> None:
    """One broken episode must not turn the run's figures into NaN for ever."""
    broken = EpochSummary(
        number=1, epochs=1, env_steps=1, agent_steps=1, return_sums={"a": math.nan, "b": math.inf, "c": 1.0}
    )
    progress.take(ONE, 0, broken, 1)
    progress.take(ONE, 0, summary(2), 1)
    assert progress.totals.return_sums == {"c": 1.0, "a": 3.0}
    with closing(Progress(path)) as again:
        assert again.totals == progress.totals


def test_line_damaged_in_the_middle_costs_only_itself(progress: Progress, path: Path) -> None:
    """Everything before and after it still counts, and it is said."""
    for number in (1, 2, 3):
        progress.take(ONE, 0, summary(number), 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 20 + b"\n" + lines[2])
    with capture_logs() as logs, closing(Progress(path)) as again:
        assert again.totals.epochs == 4
        assert again.last_taken(ONE) == 3
    assert [entry["event"] for entry in logs] == ["progress_damaged"]


def test_line_that_does_not_fit_on_the_disk_is_refused_whole(
    progress: Progress, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line is taken back, so that the next one is not appended to it."""
    progress.take(ONE, 0, summary(1), 1)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:20]))
        with pytest.raises(Refused) as caught:
            progress.take(ONE, 0, summary(2), 1)
    assert caught.value.code == "storage_failed"
    assert progress.last_taken(ONE) == 1
    assert progress.take(ONE, 0, summary(2), 1) == 2
    with closing(Progress(path)) as again:
        assert figures(again) == figures(progress)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_file_torn_at_any_byte_loses_only_what_lies_behind(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The torn line is cut off, the whole ones count, and repeats make the total right again."""
    path = tmp_path_factory.mktemp("p") / "progress.jsonl"
    with closing(Progress(path)) as progress:
        for number in (1, 2, 3):
            progress.take(ONE, 0, summary(number), 1)
            progress.take(TWO, 1, summary(number, epochs=1), 1)
    whole = path.read_bytes()
    kept = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:kept] + data.draw(st.sampled_from([b"", b"\0" * 7])))
    with closing(Progress(path)) as progress:
        lines = whole[:kept].count(b"\n")
        assert progress.last_taken(ONE) + progress.last_taken(TWO) == lines
        for number in (1, 2, 3):
            progress.take(ONE, 0, summary(number), 1)
            progress.take(TWO, 1, summary(number, epochs=1), 1)
        assert progress.totals.epochs == 9
    assert path.read_bytes().count(b"\n") == 6
    with closing(Progress(path)) as progress:
        assert progress.totals.epochs == 9
