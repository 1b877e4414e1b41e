"""Learners that die, sleep or lie: the others go on, and an old lease is worth nothing."""

import signal
import uuid
import zlib

import numpy as np
import pytest
from conftest import MakeRun
from local_run import LEASE_S, PATIENCE_S, LocalRun, Peer
from waiting import wait_for

from rookery.run_directory import RunDirectory
from shared.errors import Refused, RookeryError, StaleToken
from shared.messages import (
    CheckpointChunk,
    LeaseRequest,
    PriorityUpdate,
    Publish,
    Release,
    RunStatus,
    SampleRequest,
    SpecRegistration,
    Token,
)
from shared.specs import AgentSpec, Discrete, vector_observation

pytestmark = pytest.mark.integration

AGENTS = ("agent_0", "agent_1")


def test_learner_dead_for_good_stops_neither_actors_nor_other_learners(make_run: MakeRun) -> None:
    """Once its lease has lapsed nothing is held back for it: actors play on and the other agent learns."""
    run = make_run(actor__window_segments=4)
    services = run.start_all()
    status = run.wait_until_training()
    dead, alive = AGENTS
    dead_learner = services.pop(status.agents[dead].learner)
    dead_learner.kill()
    dead_learner.wait(10)
    status = wait_for(
        lambda: (now := run.status()) and now.agents[dead].token == 0 and now, "the dead one's lease lapses"
    )
    version = status.agents[dead].version
    for _ in range(4):
        status = wait_for(lambda since=status: goes_on(run, since, alive), "play and learning go on")
    assert status.agents[dead].version == version
    assert run.replay_stats().buffers[dead].limiter.blocked != "inserts"
    run.end_by_hand(services)


def goes_on(run: LocalRun, since: RunStatus, agent: str) -> RunStatus | None:
    """The status, if for half a lease since then far more than a window was played and the agent learned."""
    now = run.status()
    window_steps = 4 * 50 * len(AGENTS)
    further = (
        now is not None
        and now.elapsed_s > since.elapsed_s + LEASE_S / 2
        and now.agent_steps > since.agent_steps + 2 * window_steps
        and now.agents[agent].updates > since.agents[agent].updates + 10
    )
    return now if further else None


def test_learner_asleep_past_its_lease_cannot_do_anything_after_waking(make_run: MakeRun) -> None:
    """A spare learner takes the agent over; the old one is refused, says so and ends; versions never mix."""
    run = make_run(world__agents=1, param_server__keep_versions=100_000)
    services = run.start_all(learners=2)
    status = run.wait_until_training()
    old = status.agents["agent_0"].learner
    new = next(name for name in services if name.startswith("learner") and name != old)
    services[old].send_signal(signal.SIGSTOP)
    status = wait_for(
        lambda: (now := run.status()) and now.agents["agent_0"].learner == new and now,
        "the spare learner takes over",
    )
    assert status.agents["agent_0"].token == 2
    run.wait_for_progress(status, "the new learner learns")

    services[old].send_signal(signal.SIGCONT)
    assert services.pop(old).wait(PATIENCE_S) == 1
    last_words = run.log(old)[-1]
    assert last_words["event"] == "ended by an error"
    assert last_words["error"] == "StaleToken"
    refused = run.replay_stats().counters | run.wait_until_training().counters
    assert refused["refused.stale_token"] >= 1
    run.wait_for_progress(run.wait_until_training(), "the new learner goes on")
    run.end_by_hand(services)
    tokens = tokens_by_version(run)
    assert set(tokens) == {1, 2}
    assert tokens == sorted(tokens), "the old learner published after the new one"


def tokens_by_version(run: LocalRun) -> list[int]:
    folder = RunDirectory(run.path)
    kept = sorted(int(path.stem) for path in (run.path / "params/agents/agent_0").glob("*.safetensors"))
    return [folder.weights("agent_0", version).token for version in kept]


def test_requests_with_an_old_or_foreign_token_are_refused(make_run: MakeRun) -> None:
    """Publish, sample, priorities and checkpoints all ask for the newest token of exactly this agent."""
    run = make_run()
    services = {name: run.start(name) for name in ("param_server", "replay")}
    config = run.config()
    params, replay = config.endpoints.params, config.endpoints.replay[0].requests
    spec = AgentSpec(observation=vector_observation(3), discrete=Discrete(n=2))
    with Peer(config) as first, Peer(config) as second, Peer(config) as neighbour:
        first.ask(SpecRegistration(specs=dict.fromkeys(AGENTS, spec)), params)
        old = lease(first, params, "first", "agent_0")
        first.ask(Release(instance="first"), params)
        new = lease(second, params, "second", "agent_0")
        assert (old.number, new.number) == (1, 2)
        lease(neighbour, params, "neighbour", "agent_1")

        for request, arrays in writes(old):
            with pytest.raises(StaleToken, match="replaced by 2"):
                first.ask(request, params, arrays)
        wait_for(lambda: refusal(first, replay, sample(old)) == "stale_token", "replay knows the new lease")
        assert refusal(neighbour, replay, sample(new)) == "wrong_agent"
        forged = Token(agent="agent_0", number=2**62)
        assert refusal(neighbour, replay, sample(forged)) == "unknown_token"
        the_next = Token(agent="agent_0", number=3)  # may be granted any moment: waits, and is not believed
        assert refusal(neighbour, replay, sample(the_next)) == "deadline"
        with pytest.raises(Refused, match="was never granted"):  # priorities of batches that nobody drew
            neighbour.ask(sample(the_next), replay, priorities())
        assert refused_of_many(neighbour, replay, the_next) == 16
        assert refusal(second, replay, sample(new)) == "deadline"  # the real one waits for steps, as before
        for request, arrays in writes(new):
            with pytest.raises(Refused, match="another learner"):
                neighbour.ask(request, params, arrays)
        before = run.replay_stats().counters["refused.stale_token"]
        first.link(replay).tell(PriorityUpdate(token=old, draw=0), priorities())
        first.loop.turn(block=True)
        wait_for(
            lambda: run.replay_stats().counters["refused.stale_token"] > before, "old priorities refused"
        )

        for request, arrays in writes(new):
            second.ask(request, params, arrays)
    status = run.status()
    assert status is not None
    assert status.counters["refused.stale_token"] == 2
    assert status.agents["agent_0"].version == 1
    run.end_by_hand(services)
    assert tokens_by_version(run) == [2]


def test_priorities_on_a_request_for_a_batch_are_applied_once(make_run: MakeRun) -> None:
    """They ride on the next request; a repeat of it changes nothing, and what is no update is refused."""
    run = make_run()
    services = {name: run.start(name) for name in ("param_server", "replay", "actor")}
    config = run.config()
    params, replay = config.endpoints.params, config.endpoints.replay[0].requests
    with Peer(config) as learner:
        wait_for(
            lambda: (now := run.status()) and now.agent_steps > 1_000, "the actor has filled the buffers"
        )
        token = lease(learner, params, "learner", "agent_0")
        drawn = learner.link(replay).call(sample(token), timeout_s=15.0).arrays
        update = {name: drawn[name].copy() for name in ("index", "generation")}
        update["priority"] = np.full(len(drawn["index"]), 700.0, np.float32)
        request = sample(token).model_copy(update={"draw": 1})
        learner.ask(request, replay, update)
        assert run.replay_stats().buffers["agent_0"].max_priority == 700.0

        update["priority"][:] = 900.0
        learner.ask(request, replay, update)  # the same draw again
        assert run.replay_stats().buffers["agent_0"].max_priority == 700.0
        with pytest.raises(Refused, match="sample_request with arrays"):
            learner.ask(request.model_copy(update={"draw": 2}), replay, {"index": update["index"]})
    run.end_by_hand(services)


def lease(peer: Peer, params: str, instance: str, agent: str) -> Token:
    request = LeaseRequest(role="learner", instance=instance, incarnation=peer.incarnation, agent=agent)
    return peer.ask(request, params).token


def sample(token: Token) -> SampleRequest:
    return SampleRequest(token=token, draw=0, batch_size=4, beta=0.5)


def refused_of_many(peer: Peer, replay: str, token: Token) -> int:
    """Of 80 requests with a number that nobody was granted, how many replay refuses at once."""
    refused: list[RookeryError] = []
    link = peer.link(replay)
    for draw in range(80):
        request = sample(token).model_copy(update={"draw": draw})
        link.ask(request, on_reply=pytest.fail, on_failure=refused.append, timeout_s=6.0)
    peer.loop.turn_until(lambda: len(refused) >= 80, 2.0)
    return len(refused)


def refusal(peer: Peer, replay: str, request: SampleRequest) -> str:
    """The code with which replay refuses."""
    try:
        peer.ask(request, replay, timeout_s=2.0)
    except Refused as error:
        return error.code
    return ""


def priorities() -> dict[str, np.ndarray]:
    return {
        "index": np.zeros(1, np.int64),
        "generation": np.zeros(1, np.uint64),
        "priority": np.ones(1, np.float32),
    }


def writes(token: Token) -> list[tuple[Publish | CheckpointChunk, dict[str, np.ndarray]]]:
    """A publish and a whole checkpoint."""
    data = np.arange(10, dtype=np.uint8)
    chunk = CheckpointChunk(
        token=token,
        checkpoint_id=uuid.uuid4().hex,
        offset=0,
        total_bytes=len(data),
        checksum=zlib.crc32(data.tobytes()),
    )
    weights = {"layer.weight": np.ones((2, 3), np.float32)}
    return [(Publish(token=token, publish_id=uuid.uuid4().hex, updates=1), weights), (chunk, {"data": data})]
