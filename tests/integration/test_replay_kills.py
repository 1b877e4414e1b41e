"""kill -9 of a loaded replay service at random moments; `make soak-replay` is the long version."""

from pathlib import Path

import pytest

from bench.replay_kills import run_kills

pytestmark = pytest.mark.integration


def test_replay_killed_under_load_keeps_every_acknowledged_segment_once(tmp_path: Path) -> None:
    """Eight deaths: what was acknowledged and not overwritten is there, byte for byte, once, undamaged."""
    outcome = run_kills(tmp_path, 8, capacity_steps=2**17, seed=11)
    assert outcome.problems == []
    assert outcome.kills == 8
    assert outcome.segments_compared > 1_000
    assert max(outcome.restarts_s) < 10.0  # on busy cores; the soak run holds it to 2 s
