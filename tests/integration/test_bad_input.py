"""Garbage on every port: counted, logged and dropped, while the run goes on."""

import os
import socket
import struct
import uuid
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import MakeRun
from local_run import LocalRun, Peer, assert_journal_equals_ring, wait_for

from shared.codec import checksum, encode
from shared.config import Config
from shared.messages import Hello, ReplayStats, ReplayStatsRequest, RunStatus, Segment, SpecRequest, StatusRequest
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
        checksum=checksum(arrays.values()),
    )
    return segment, arrays


def bad_segments(spec: AgentSpec, run: str) -> list[list[Any]]:
    """Messages for the segment link, each wrong in one way."""
    segment, arrays = make_segment(spec, run)
    wide = arrays | {"observation": np.zeros((6, 7), arrays["observation"].dtype)}
    long = {name: np.concatenate([array, array]) for name, array in arrays.items()}
    other_type = arrays | {"reward": arrays["reward"].astype(np.float64)}
    whole = encode(segment, arrays)
    return [
        encode(segment, wide),
        encode(segment, long),
        encode(segment, other_type),
        encode(segment.model_copy(update={"rows": 60_000, "owned": 50_000}), arrays),
        encode(segment, {name: array for name, array in arrays.items() if name != "turn"}),
        encode(segment.model_copy(update={"checksum": segment.checksum ^ 1}), arrays),
        encode(segment.model_copy(update={"agent": "agent_99"}), arrays),
        encode(segment.model_copy(update={"run": "another"}), arrays),
        encode(Hello(run=run, service="client", instance="x", incarnation=uuid.uuid4().hex)),
        [whole[0], bytes(whole[1])[:-4], *whole[2:]],
        whole[:-1],
        [bytes(whole[0])[:-20], *whole[1:]],
        [b""],
        [os.urandom(300), os.urandom(5)],
        [b'{"kind": "segment", "protocol": 2}'],
    ]


def send_each(config: Config, kind: int, endpoint: str, messages: list[list[Any]]) -> None:
    """Each message over a connection of our own; returns when libzmq has taken them all to the other end."""
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
        raw.settimeout(5)
        try:
            while raw.recv(4096):
                pass
        except OSError:
            pass  # it may wait for more, or reset the connection: both are fine


def endpoints_of(config: Config) -> list[str]:
    replay = config.endpoints.replay[0]
    return [config.endpoints.params, config.endpoints.broadcast, replay.requests, replay.segments]
