"""Whoever is no member of the run: without keys, with other keys, with random bytes, on every port."""

from __future__ import annotations

import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from real_run import COMPOSE_FILE, DEBUG_FILE, START_S, RealRun
from waiting import wait_for

from rookery.testing.stack import Stack
from shared.keys import KeyPair, make_keys, read_keys

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

KINDS = {5701: zmq.PUSH, 5702: zmq.DEALER, 5703: zmq.DEALER, 5704: zmq.SUB}
QUIET_S = 2.0
REFUSED = ("bad_keys", "bad_handshakes", "disconnects")


def address(run: RealRun, port: int) -> tuple[str, int]:
    return (run.replay if port in (5701, 5702) else run.param_server).published(port)


def gets_nothing(run: RealRun, port: int, keys: tuple[bytes, KeyPair] | None) -> bool:
    """Whether somebody who asks and listens there hears nothing, and cannot even hand in a message."""
    host, published = address(run, port)
    with zmq.Context() as context, context.socket(KINDS[port]) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued before the other side has agreed to talk
        if keys is not None:
            server, own = keys
            stranger.setsockopt(zmq.CURVE_SERVERKEY, server)
            stranger.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            stranger.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        if KINDS[port] == zmq.SUB:
            stranger.setsockopt(zmq.SUBSCRIBE, b"")
        stranger.connect(f"tcp://{host}:{published}")
        wanted = zmq.POLLIN if KINDS[port] == zmq.SUB else zmq.POLLOUT
        return not stranger.poll(int(QUIET_S * 1000), wanted)


def counters(run: RealRun) -> Counter[str]:
    return Counter(run.status().counters) + Counter(run.stats().counters)


def test_strangers_get_nothing_in_or_out(
    rookery_stack: Callable[..., Stack], rookery_image: str, small_run: dict[str, object], tmp_path: Path
) -> None:
    stack = rookery_stack(
        [COMPOSE_FILE, DEBUG_FILE],
        variables={"ROOKERY_IMAGE": rookery_image, "AGENTS": 1},
        environment=small_run,
        deadline_s=START_S,
    )
    run = RealRun(stack, tmp_path)
    run.wait_for_progress("the run trains")
    server = read_keys(run.keys).server_public
    make_keys(tmp_path / "other")
    shutil.rmtree(tmp_path / "wrong", ignore_errors=True)
    other = read_keys(tmp_path / "other")
    member = read_keys(run.keys).member
    before = run.status()

    assert not gets_nothing(run, 5704, (server, member)), "not even members hear anything: the test is wrong"
    assert not gets_nothing(run, 5703, (server, member)), "not even members may speak: the test is wrong"
    for port in KINDS:
        counted = counters(run)
        assert gets_nothing(run, port, None), f"port {port} without keys"
        assert gets_nothing(run, port, (server, other.member)), f"port {port} with a stranger's key"
        assert gets_nothing(run, port, (other.server_public, member)), f"port {port}, for another server"
        for data in (os.urandom(4_000), b"GET / HTTP/1.1\r\n\r\n", bytes(1_000)):
            with socket.create_connection(address(run, port), timeout=5) as raw:
                raw.sendall(data)
        wait_for(
            lambda counted=counted: sum(counters(run)[name] - counted[name] for name in REFUSED) >= 3,
            f"what came to port {port} is counted",
        )
    for container in (run.param_server, run.replay):
        assert container.restarts == 0
    assert "not a member's key" in run.param_server.logs()
    run.wait_for_progress("the run trains on", before)
    ledger = run.assert_balanced()
    assert ledger["abandoned"] == ledger["duplicates_dropped"] == 0
