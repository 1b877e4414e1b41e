"""Garbage on every port: counted, logged and dropped, while the run goes on."""

import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import MakeRun
from local_run import LocalRun, Peer, assert_journal_equals_ring, end
from waiting import wait_for

from shared.codec import encode, segment_checksum
from shared.errors import Refused
from shared.layout import pack
from shared.messages import (
    EpochSummary,
    Heartbeat,
    Hello,
    LeaseRequest,
    ReplayStatsRequest,
    RunStatus,
    Segment,
    ServiceStatus,
    SpecRequest,
    StatusRequest,
    StreamReport,
)
from shared.segment_frame import HEADER_BYTES, frame_of
from shared.specs import AgentSpec

pytestmark = pytest.mark.integration

LIMIT_BYTES = 1 << 20


def make_segment(spec: AgentSpec, run: str) -> tuple[Segment, dict[str, np.ndarray]]:
    """A whole segment that replay would store, were it not for what the test breaks."""
    owned = 5
    arrays = {
        column.name: np.zeros((owned + (column.per == "observation"), *column.shape), column.dtype.numpy)
        for column in spec.columns
    }
    segment = Segment(
        run=run,
        incarnation=uuid.uuid4().hex,
        agent="agent_0",
        sequence=1,
        produced_steps=owned,
        actor_index=9,
        slot=0,
        epoch=0,
        before=0,
        owned=owned,
        rows=owned + 1,
        checksum=segment_checksum(pack(arrays)),
    )
    return segment, arrays


def bad_segments(spec: AgentSpec, run: str) -> list[list[Any]]:
    """Messages for the segment link, each wrong in one way."""
    segment, arrays = make_segment(spec, run)
    wide = arrays | {"observation": np.zeros((6, 7), arrays["observation"].dtype)}
    long = {name: np.concatenate([array, array]) for name, array in arrays.items()}
    other_type = arrays | {"reward": arrays["reward"].astype(np.float64)}
    whole = frame_of(segment, arrays).data

    def changed(**changes: Any) -> list[Any]:
        return [frame_of(segment.model_copy(update=changes), arrays).data]

    return [
        [frame_of(segment, wide).data],
        [frame_of(segment, long).data],
        [frame_of(segment, other_type).data],
        changed(rows=60_000, owned=50_000),
        [frame_of(segment, {name: array for name, array in arrays.items() if name != "turn"}).data],
        changed(checksum=segment.checksum ^ 1),
        changed(agent="agent_99"),
        changed(run="another"),
        encode(Hello(run=run, service="client", instance="x", incarnation=uuid.uuid4().hex)),
        encode(segment, arrays),
        [whole[:-4]],
        [whole, b""],
        [whole[: HEADER_BYTES - 20]],
        [b"segment\x02" + bytes(whole)[8:]],
        [b""],
        [os.urandom(300), os.urandom(5)],
    ]


def bad_messages(run: str) -> list[list[Any]]:
    """Messages for a request link that are none."""
    header = encode(StatusRequest(run=run, request=1))[0]
    return [
        [b""],
        [bytes(header)[:-1]],
        [header, b"an array that nobody announced"],
        [b'{"kind": "status_request", "protocol": 99}'],
        [b'{"kind": "import os"}'],
        [b"[" * 100_000],
        *([os.urandom(size)] for size in range(1, 200, 10)),
    ]


def send_each(kind: int, endpoint: str, messages: list[list[Any]]) -> None:
    """Each message over a connection of our own, which closes when all of them are on their way."""
    with zmq.Context() as context, context.socket(kind) as sender:
        sender.setsockopt(zmq.LINGER, 5_000)
        sender.connect(endpoint)
        for message in messages:
            sender.send_multipart(message)


def shout_into(endpoint: str, data: bytes) -> None:
    """Raw bytes, without any protocol."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(data)


NOT_OUR_PROTOCOL = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 200,
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48) + b"\x04\x05junk!",
    b"\x16\x03\x01" + bytes(range(200)),
)


class Witness:
    """Asks both answering services for what they counted, over connections that stay open."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.endpoints = peer.config.endpoints

    def replay(self) -> Counter[str]:
        return Counter(self.peer.ask(ReplayStatsRequest(), self.endpoints.replay[0].requests).counters)

    def params(self) -> Counter[str]:
        return Counter(self.peer.ask(StatusRequest(), self.endpoints.params).counters)


def test_services_fed_with_garbage_count_it_and_go_on(make_run: MakeRun) -> None:
    """Wrong shapes, torn frames, random bytes and oversize frames change nothing but the counters."""
    run = make_run(world__agents=1, limits__max_message_bytes=LIMIT_BYTES)
    services = run.start_all(learners=1)
    before = run.wait_until_training()
    config = run.config()
    replay, params = config.endpoints.replay[0], config.endpoints.params
    with Peer(config) as peer:
        witness = Witness(peer)
        specs = peer.ask(SpecRequest(), params).specs
        segments, messages = bad_segments(specs["agent_0"], peer.run), bad_messages(peer.run)

        send_each(zmq.PUSH, replay.segments, segments)
        wait_for(lambda: witness.replay()["bad_segments"] == len(segments), "bad segments are counted")
        send_each(zmq.DEALER, replay.requests, messages)
        wait_for(lambda: witness.replay()["bad_messages"] == len(messages), "replay counts bad messages")
        send_each(zmq.DEALER, params, messages)
        wait_for(lambda: witness.params()["bad_messages"] == len(messages), "the parameter server counts")

        for endpoint in (params, config.endpoints.broadcast, replay.requests, replay.segments):
            for data in NOT_OUR_PROTOCOL:
                shout_into(endpoint, data)
        strangers = 2 * len(NOT_OUR_PROTOCOL)  # each of the two services has two ports
        wait_for(lambda: witness.replay()["bad_handshakes"] == strangers, "replay counts strangers")
        wait_for(lambda: witness.params()["bad_handshakes"] == strangers, "so does the parameter server")

        forged = StreamReport(incarnation="0" * 32, produced_steps={"agent_0": 1_000}, final=True)
        with pytest.raises(Refused, match="speaks for itself alone"):
            peer.ask(forged, replay.requests)
        actor = next(service for service in before.services if service.service == "actor")
        for claimed in in_the_name_of(actor):
            with pytest.raises(Refused, match="speaks for itself alone"):
                peer.ask(claimed, params)

        assert_oversize_ends_connection(zmq.PUSH, replay.segments, witness.replay)
        assert_oversize_ends_connection(zmq.DEALER, replay.requests, witness.replay)
        assert_oversize_ends_connection(zmq.DEALER, params, witness.params)

    after = run.wait_for_progress(run.wait_until_training(), "training goes on")
    assert pids(after) == pids(before)
    assert all(service.poll() is None for service in services.values())
    assert_logged(run)
    end(services.pop("actor"), "actor")
    ledger = run.ledger()
    assert ledger.lost == ledger.stored_twice == ledger.in_flight == ledger.abandoned == 0
    assert ledger.produced == ledger.stored
    run.end_by_hand(services)
    assert_journal_equals_ring(run)


def in_the_name_of(actor: ServiceStatus) -> tuple[Heartbeat, LeaseRequest]:
    """A heartbeat that would take this actor's place in the count of epochs, and a request for its lease."""
    counted = EpochSummary(number=2**40, epochs=1, env_steps=1, agent_steps=1, return_sums={"agent_0": 0.0})
    who = {"instance": actor.instance, "incarnation": actor.incarnation}
    return (
        Heartbeat(service="actor", **who, pid=1, host="here", up_s=1.0, index=0, epochs=counted),
        LeaseRequest(role="actor", **who),
    )


def assert_oversize_ends_connection(kind: int, endpoint: str, counters: Callable[[], Counter[str]]) -> None:
    before = counters()["disconnects"]
    send_each(kind, endpoint, [[bytes(LIMIT_BYTES + 1)]])
    wait_for(lambda: counters()["disconnects"] > before, f"an oversize frame at {endpoint} is refused")


def pids(status: RunStatus) -> dict[str, int]:
    return {service.instance: service.pid for service in status.services}


def assert_logged(run: LocalRun) -> None:
    assert {"bad segment dropped", "bad message dropped"} <= set(run.events("replay"))
    for service in ("replay", "param_server"):
        assert {"bad message dropped", "connection refused: not our protocol"} <= set(run.events(service))
