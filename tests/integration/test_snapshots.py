"""A run whose pace is changed while it trains, and whose experience is put back."""

from __future__ import annotations

import pytest
from conftest import MakeRun
from local_run import LocalRun
from waiting import wait_for

pytestmark = pytest.mark.integration

RATIO = 4.0
STARTS = 3  # of replay: the first, after the kill, after the restore


def test_run_repaced_snapshotted_and_restored_goes_on(make_run: MakeRun) -> None:
    """A new ratio shows in the batches drawn and outlives replay; a restored snapshot trains on."""
    run = make_run(world__agents=1, replay__capacity_steps=4_000)
    launcher = run.train()
    run.wait_until_training()
    path = str(run.path)
    assert "4 samples per insert" in run.command("replay", path, "limiter", "--samples-per-insert", "4")
    wait_for(lambda: abs(measured_ratio(run) - RATIO) < 0.25 * RATIO, "four samples are drawn an insert", 40)
    run.kill("replay-0")
    wait_for(lambda: run.events("replay-0").count("ready") == 2, "replay is back")
    assert "4 samples per insert" in run.command("replay", path, "limiter")

    assert "snapshot 1: agent_0" in run.command("replay", path, "snapshot")
    taken = next(line for line in run.log("replay-0") if line["event"] == "snapshot taken")
    before = run.wait_until_training()
    run.wait_for_progress(before, "training goes on after the snapshot")
    first = run.interrupt(launcher)

    assert "restored snapshot 1" in run.command("replay", path, "restore")
    assert (run.path / "replay" / "before-restore-1" / "agent_0" / "rows").exists()
    launcher = run.train("--resume", path, "--minutes", "5")
    wait_for(lambda: opened_steps(run) == taken["steps"]["agent_0"], "the snapshot's steps are open")
    status = run.wait_until_training()
    assert status.agent_steps >= first["agent_steps"]
    run.wait_for_progress(status, "the restored run trains")
    ledger = run.interrupt(launcher)["ledger"]
    assert ledger["lost"] == ledger["stored_twice"] == 0
    assert ledger["produced"] == ledger["stored"] + ledger["in_flight"] + ledger["abandoned"]


def measured_ratio(run: LocalRun) -> float:
    """Samples per insert over the next second or so."""
    first = run.replay_stats().buffers["agent_0"]

    def later() -> float:
        now = run.replay_stats().buffers["agent_0"]
        inserted = now.inserted_steps - first.inserted_steps
        return (now.sampled_steps - first.sampled_steps) / inserted if inserted > 1_500 else 0.0

    return wait_for(later, "more is inserted")


def opened_steps(run: LocalRun) -> int:
    """What replay found when it was last started."""
    lines = [line for line in run.log("replay-0") if line["event"] == "buffer open"]
    return lines[-1]["steps"] if len(lines) == STARTS else -1
