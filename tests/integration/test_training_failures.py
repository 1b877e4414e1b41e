"""Training that fails in one agent's learner: it comes back from its checkpoint, all others go on."""

from __future__ import annotations

from pathlib import Path

import failing_algorithms
import numpy as np
import pytest
from conftest import MakeRun
from local_run import LocalRun, service_named
from waiting import wait_for

from rookery.run_directory import RunDirectory
from shared.messages import RunStatus

pytestmark = pytest.mark.integration

MAX_SKIPPED = 20
DEADLINE_S = 5.0  # for an update: others must be seen to go on for so long
REASONS = {
    "nan": f"{MAX_SKIPPED} updates in a row were not finite",
    "raise": f"RuntimeError: {failing_algorithms.RAISED}",
    "poison": "values that are not finite in",
    "hang": "stuck for 0:00:06; its log says where",
}


@pytest.fixture(autouse=True)
def _users_module_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the services, as a user would do it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def test_learner_that_fails_in_any_way_comes_back_from_its_checkpoint_while_others_go_on(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """A loss that is not finite, an exception, spoilt weights, a hang inside C: one after the other."""
    trigger = tmp_path / "trigger"
    own = {"algorithm": "failing_algorithms:FailsWhenTold", "options": {"trigger": str(trigger)}}
    run = make_run(
        agents={"agent_0": own}, learner__max_skipped=MAX_SKIPPED, learner__update_deadline_s=DEADLINE_S
    )
    launcher = run.train()
    instance = run.wait_until_training().agents["agent_0"].learner
    for number, how in enumerate(REASONS, start=1):
        before = wait_for(lambda: has_checkpoint(run, instance), f"agent_0 has a checkpoint before {how}")
        (tmp_path / "telling").write_text(how)
        (tmp_path / "telling").rename(trigger)
        wait_for(lambda: not trigger.exists(), f"agent_0's learner takes in to {how}")
        status = wait_for(lambda since=before: others_go_on(run, since), f"others go on despite {how}")
        if how == "hang":
            assert failures(status, instance) == number - 1, "it is still stuck, and nobody waited for it"
        wait_for(lambda count=number: failures(run.status(), instance) == count, f"it ended after {how}")
        assert REASONS[how] in run.wait_until_known().failures[instance].reason
        wait_for(lambda since=before: is_back(run, instance, since), f"agent_0 learns again after {how}")
    summary = run.interrupt(launcher)
    assert summary["restarts"] == {instance: len(REASONS)}
    check_ledger(summary["ledger"])
    resumed_at = [line["updates"] for line in run.log(instance) if line["event"] == "learning"]
    assert resumed_at[0] == 0
    assert all(updates > 0 for updates in resumed_at[1:])
    text = (run.path / "logs" / f"{instance}.log").read_text()
    assert "in hang\n" in text
    assert f"RuntimeError: {failing_algorithms.RAISED}\n" in text
    assert all(all_finite(run, agent) for agent in ("agent_0", "agent_1"))


def has_checkpoint(run: LocalRun, instance: str) -> RunStatus | None:
    """The status, if this life of the learner has learned, skipped much, and put a checkpoint away."""
    status = run.status()
    learners = [each for each in status.services if each.instance == instance] if status else []
    known = [each.metrics for each in learners if each.metrics]
    if not known or known[0]["checkpoints"] < 1 or known[0]["updates"] <= 20:
        return None
    return status if known[0]["skipped_updates"] > MAX_SKIPPED else None


def others_go_on(run: LocalRun, since: RunStatus) -> RunStatus | None:
    now = run.status()
    further = (
        now is not None
        and now.agent_steps > since.agent_steps + 1_000
        and now.agents["agent_1"].updates > since.agents["agent_1"].updates + 50
    )
    return now if further else None


def failures(status: RunStatus | None, instance: str) -> int:
    return status.failures[instance].count if status and instance in status.failures else 0


def is_back(run: LocalRun, instance: str, since: RunStatus) -> bool:
    """Another process learns for the agent, beyond where the old one was."""
    status = run.status()
    if status is None or instance not in [each.instance for each in status.services]:
        return False
    another = service_named(status, instance).pid != service_named(since, instance).pid
    return another and status.agents["agent_0"].updates > since.agents["agent_0"].updates


def all_finite(run: LocalRun, agent: str) -> bool:
    """Of what is kept, every version."""
    folder = RunDirectory(run.path)
    kept = [int(path.stem) for path in (run.path / "params" / "agents" / agent).glob("*.safetensors")]
    tensors = [array for version in kept for array in folder.weights(agent, version).tensors.values()]
    return bool(tensors) and all(np.isfinite(array).all() for array in tensors)


def check_ledger(ledger: dict[str, int]) -> None:
    assert ledger["produced"] == ledger["stored"]
    assert ledger["lost"] == ledger["abandoned"] == ledger["in_flight"] == ledger["stored_twice"] == 0


def test_learner_that_fails_in_every_life_neither_stops_nor_floods_the_run(make_run: MakeRun) -> None:
    """It is started again later and later, anybody can see why, and the other agent learns meanwhile."""
    run = make_run(agents={"agent_0": {"algorithm": "failing_algorithms:FailsAtOnce"}})
    launcher = run.train()
    status = wait_for(lambda: others_learned(run), "agent_1 learns and agent_0's learner failed", 60)
    (instance,) = status.failures
    for count in (2, 3):
        wait_for(lambda least=count: failures(run.status(), instance) >= least, f"it fails {count} times")
        since = run.wait_until_known()
        wait_for(lambda since=since: others_go_on(run, since), "the others go on")
    shown = " ".join(run.command("status", str(run.path)).split())  # it is wrapped to the width of a terminal
    assert f"{instance} failed" in shown
    assert f"RuntimeError: {failing_algorithms.RAISED}" in shown
    summary = run.interrupt(launcher)
    assert list(summary["restarts"]) == [instance]
    assert summary["restarts"][instance] >= 2
    assert summary["agents"]["agent_0"]["updates"] == 0
    check_ledger(summary["ledger"])
    said = [line for line in run.output().splitlines() if line.startswith(instance)]
    assert all(f"ended with code 1 (RuntimeError: {failing_algorithms.RAISED})" in line for line in said)
    assert [line.rsplit(" in ", 1)[1] for line in said[:3]] == ["0.4 s", "0.8 s", "1.6 s"]


def others_learned(run: LocalRun) -> RunStatus | None:
    status = run.status()
    learned = status is not None and "agent_1" in status.agents and status.agents["agent_1"].updates > 0
    return status if status is not None and learned and status.failures else None
