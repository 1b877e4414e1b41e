"""Training on several machines, some of which are lost on the way, with the stack file that we ship."""

from collections.abc import Iterator

import pytest
import yaml
from cluster import Cluster, MakeCluster
from docker_command import docker
from swarm_run import PROGRESS_S, ROOT, STACK, SwarmRun, make_keys
from waiting import wait_for

from shared.messages import RunStatus

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(1500)]

IMAGE = "rookery:swarm-test"
CHECKPOINT_S = 1.0
SMALL = {
    "run": {"minutes": None},
    "world": {"agents": 2},
    "actor": {"envs": 4},
    "replay": {"capacity_steps": 100_000, "min_steps": 200, "samples_per_insert": 1},
    "learner": {
        "network": {"hidden": [32]},
        "batch_size": 32,
        "publish_s": 0.3,
        "checkpoint_s": CHECKPOINT_S,
    },
}


@pytest.fixture(scope="module")
def run(make_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmRun]:
    """Three machines: the first keeps the state, the others may have learners; actors are everywhere."""
    docker("build", "--quiet", "--tag", IMAGE, str(ROOT), timeout_s=1_200)
    cluster = make_cluster(nodes=3, images=[IMAGE])
    state, *others = cluster.nodes
    cluster.label(state, rookery__params="true", rookery__replay="true")
    for node in others:
        cluster.label(node, gpu="true")
    files = tmp_path_factory.mktemp("deploy")
    make_keys(IMAGE, files / "keys")
    (files / "stack-settings.yaml").write_text(yaml.safe_dump(SMALL))
    run = SwarmRun(cluster)
    run.deploy(IMAGE, files / "keys", files / "stack-settings.yaml", learners=2, actors=3)
    return run


@pytest.fixture
def cluster(run: SwarmRun) -> Cluster:
    return run.cluster


def assert_nothing_is_lost(ledger: dict[str, int]) -> None:
    assert ledger["lost"] == ledger["stored_twice"] == 0, ledger
    assert ledger["produced"] == ledger["stored"] + ledger["abandoned"], ledger


def hosts_of(status: RunStatus, service: str) -> set[str]:
    """Of those that are there now."""
    lively = [own for own in status.services if own.service == service and own.seen_s < 5.0 and own.ready]
    return {own.host for own in lively}


def test_services_train_on_machines_that_their_labels_allow(run: SwarmRun, cluster: Cluster) -> None:
    """State where its label is, learners on GPU machines, actors everywhere; and all of it trains."""
    for service, replicas in (("param_server", 1), ("replay", 1), ("learner", 2), ("actor", 3)):
        cluster.wait_until_runs(f"{STACK}_{service}", replicas)
    assert cluster.places(f"{STACK}_param_server") == cluster.places(f"{STACK}_replay") == ["node-1"]
    assert sorted(cluster.places(f"{STACK}_learner")) == ["node-2", "node-3"]
    assert sorted(cluster.places(f"{STACK}_actor")) == ["node-1", "node-2", "node-3"]
    first = run.wait_until_trains()
    later = run.wait_until_trains(first, "it goes on training")
    assert hosts_of(later, "learner") == {"node-2", "node-3"}, "the status says where a learner is"
    ledger = run.final_ledger()
    assert_nothing_is_lost(ledger)
    assert ledger["abandoned"] == 0


def test_actors_spread_to_a_new_machine_and_survive_its_loss(run: SwarmRun, cluster: Cluster) -> None:
    """More actors go where there is room; when that machine is gone they play on others, undisturbed."""
    before = run.wait_until_trains()
    added = cluster.add_node([IMAGE])
    cluster.scale(f"{STACK}_actor", 5)
    cluster.wait_until_runs(f"{STACK}_actor", 5)
    assert added.name in cluster.places(f"{STACK}_actor")
    assert added.name not in cluster.places(f"{STACK}_learner"), "it has no label for learners"
    wait_for(
        lambda: (status := run.status()) is not None and added.name in hosts_of(status, "actor"),
        f"actors on {added.name} play",
        PROGRESS_S,
        explain=run.describe,
    )

    at_loss = run.wait_until_trains(before)
    cluster.take_away(added)
    cluster.wait_until_runs(f"{STACK}_actor", 5)
    assert added.name not in cluster.places(f"{STACK}_actor")
    after = run.wait_until_trains(at_loss, "it trains without the lost machine")
    tokens = {agent: own.token for agent, own in at_loss.agents.items()}
    assert {agent: own.token for agent, own in after.agents.items()} == tokens, "a learner was disturbed"
    assert_nothing_is_lost(run.final_ledger())
    cluster.scale(f"{STACK}_actor", 3)
    cluster.wait_until_runs(f"{STACK}_actor", 3)


def test_a_learner_of_a_lost_machine_goes_on_elsewhere_from_its_checkpoint(
    run: SwarmRun, cluster: Cluster
) -> None:
    """Its checkpoint is with the parameter server: the new one repeats at most what came after it."""
    before = run.wait_until_trains()
    lost = cluster.node("node-3")
    agent = next(own.holds for own in before.services if own.service == "learner" and own.host == lost.name)
    patience_s = 5 * CHECKPOINT_S  # after which a checkpoint of `before`, or of later, has arrived
    wait_for(
        lambda: (status := run.status()) is not None and status.elapsed_s > before.elapsed_s + patience_s,
        "some seconds of training",
        PROGRESS_S,
    )

    cluster.take_away(lost)
    places = [task.node for task in cluster.wait_until_runs(f"{STACK}_learner", 2)]
    assert places == ["node-2", "node-2"]
    run.wait_until_trains(before, "it trains without the lost machine")
    resumed = [said for said in run.events("learner", "learning") if said["agent"] == agent][-1]
    assert resumed["token"] > before.agents[agent].token
    assert resumed["updates"] >= before.agents[agent].updates > 0
    assert_nothing_is_lost(run.final_ledger())
    cluster.bring_back(lost)


def test_the_machine_with_the_state_comes_back_and_the_run_goes_on(run: SwarmRun, cluster: Cluster) -> None:
    """Without it nothing is stored or published, and after a power cut it all continues: the same run."""
    before = run.wait_until_trains()
    cluster.reboot(cluster.manager)
    after = run.wait_until_trains(before, "it trains after the power cut")
    assert after.run_id == before.run_id
    assert_nothing_is_lost(run.final_ledger())


def test_replay_moves_to_another_machine_with_all_it_has(run: SwarmRun, cluster: Cluster) -> None:
    """As docs/swarm.md says it is done: nothing is lost, and nothing abandoned."""
    old, new = cluster.node("node-1"), cluster.node("node-2")
    before, abandoned = run.wait_until_trains(), run.final_ledger()["abandoned"]
    cluster.stop(f"{STACK}_replay")
    cluster.copy_volume(f"{STACK}_replay", IMAGE, old, new)
    cluster.unlabel(old, "rookery.replay")
    cluster.label(new, rookery__replay="true")
    cluster.scale(f"{STACK}_replay", 1)
    wait_until_replay_is_on(new.name, run)
    assert all(said["steps"] > 0 for said in run.events("replay", "buffer open")[-2:])
    run.wait_until_trains(before, "it trains with the experience it had")
    ledger = run.final_ledger()
    assert_nothing_is_lost(ledger)
    assert ledger["abandoned"] == abandoned


def wait_until_replay_is_on(node: str, run: SwarmRun) -> None:
    wait_for(
        lambda: run.cluster.places(f"{STACK}_replay") == [node],
        f"replay runs on {node}",
        PROGRESS_S,
        explain=run.describe,
    )


def test_replay_on_another_machine_begins_empty_and_the_run_goes_on(run: SwarmRun, cluster: Cluster) -> None:
    """What is left when replay's machine does not come back: experience is gone, what was learned is not."""
    before = run.wait_until_trains()
    cluster.unlabel(cluster.node("node-2"), "rookery.replay")
    cluster.label(cluster.node("node-3"), rookery__replay="true")
    wait_until_replay_is_on("node-3", run)
    assert {said["steps"] for said in run.events("replay", "buffer open")[-2:]} == {0}
    after = run.wait_until_trains(before, "it trains with new experience")
    assert after.run_id == before.run_id
    ledger = run.final_ledger()
    assert_nothing_is_lost(ledger)
    assert ledger["abandoned"] > before.agent_steps // 2, "what lay on the other machine is counted"
