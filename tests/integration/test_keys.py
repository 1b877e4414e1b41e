"""A run whose links have keys: it trains as ever, and strangers get nothing in or out."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MakeRun
from local_run import Peer

from rookery.client import RunClient
from shared.config import load_config
from shared.errors import PeerSilent
from shared.keys import make_keys
from shared.messages import ReplayStatsRequest, StatusRequest

pytestmark = pytest.mark.integration


def test_run_with_keys_trains_and_a_stranger_is_only_counted(make_run: MakeRun, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    run = make_run(security__keys=str(tmp_path / "keys"))
    services = run.start_all()
    before = run.wait_until_training()
    without_keys = load_config(run.path / "config.yaml", ['security.keys=""'], environment={})
    with pytest.raises(PeerSilent, match="nothing answers"), RunClient(without_keys, timeout_s=1.0):
        pass
    config = run.config()
    with Peer(config) as member:
        assert member.ask(StatusRequest(), config.endpoints.params).counters["bad_handshakes"] > 0
        replay = config.endpoints.replay[0].requests
        assert "bad_handshakes" not in member.ask(ReplayStatsRequest(), replay).counters
    run.wait_for_progress(before, "it trains on")
    run.end_by_hand(services)
