"""Sockets with keys: members pass; whoever has no key, another key or no protocol gets nothing in or out."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from shared.config import load_config
from shared.errors import ConfigError
from shared.keys import Keys, add_member, make_keys, read_keys
from shared.links.broadcast import NOTICES, Broadcaster, BroadcastListener
from shared.links.network import Network, listening_address
from shared.links.requests import Incoming, RequestReceiver, RequestSender
from shared.links.segments import SegmentReceiver, SegmentSender
from shared.loop import Loop
from shared.messages import Hello, RunNotice, Segment, Welcome
from shared.segment_frame import SegmentFrame, SegmentHead, frame_of

LIMIT = 1 << 20
WAIT_S = 10.0
QUIET_S = 0.7  # a handshake on loopback takes a few milliseconds
EVERYWHERE = "tcp://0.0.0.0:*"


class Town:
    """A run's three listening sockets with their keys, and whoever else comes along, in one loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_keys(directory / "own")
        self.loop = Loop()
        self.networks: list[Network] = []
        self.heard: list[str] = []
        server = self.network(read_keys(directory / "own"))
        self.requests = RequestReceiver(server, EVERYWHERE, {"hello": self.on_hello}, name="desk")
        self.segments = SegmentReceiver(server, EVERYWHERE, self.on_segment, run="run")
        self.broadcasts = Broadcaster(server, EVERYWHERE, run="run")
        self.requests.run = "run"
        self.loop.every(0.02, lambda: self.broadcasts.send(NOTICES, notice()))

    def network(self, keys: Keys | None) -> Network:
        self.networks.append(Network(self.loop, max_message_bytes=LIMIT, keys=keys))
        return self.networks[-1]

    def on_hello(self, message: Hello, incoming: Incoming) -> None:
        self.heard.append("hello")
        welcome = Welcome(request=message.request, run_id="run", state="running", lease_s=5.0)
        self.requests.reply(incoming.peer, welcome)

    def on_segment(self, _segment: SegmentHead, _block: object) -> None:
        self.heard.append("segment")

    def visit(self, keys: Keys | None) -> list[str]:
        """What somebody with these keys gets to hear; it asks, listens and pushes all it can."""
        network, got = self.network(keys), []
        sender = RequestSender(network, reach(self.requests), identity=f"visitor-{len(self.networks)}")
        sender.ask(hello(), on_reply=lambda _received: got.append("welcome"), timeout_s=WAIT_S)
        listener = BroadcastListener(
            network, reach(self.broadcasts), run="run", on_notice=lambda _notice: got.append("notice")
        )
        segments = SegmentSender(network, reach(self.segments), queue=10)
        segment = a_segment()
        pushed = [False]

        def push() -> None:
            pushed[0] = pushed[0] or segments.send(segment)

        pushing = self.loop.every(0.02, push)
        self.loop.turn_until(lambda: {"welcome", "notice"} <= set(got) and "segment" in self.heard, QUIET_S)
        pushing.cancel()
        for link in (segments, sender, listener):
            link.close()
        return sorted(set(got))

    def count(self, name: str) -> int:
        return sum(link.counters[name] for link in (self.requests, self.segments, self.broadcasts))

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.loop.turn_until(condition, WAIT_S), "this did not happen in time"

    def close(self) -> None:
        for network in self.networks:
            network.close()
        self.loop.close()


def reach(link: RequestReceiver | SegmentReceiver | Broadcaster) -> str:
    """Where others find a link that listens everywhere."""
    address = link._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    return f"tcp://127.0.0.1:{address.rsplit(':', 1)[1]}"


def hello() -> Hello:
    return Hello(service="client", instance="visitor", incarnation="a" * 32)


def notice() -> RunNotice:
    return RunNotice(state="running", epochs=0, agent_steps=0, learners={}, versions={})


def a_segment() -> SegmentFrame:
    segment = Segment(
        run="run",
        incarnation="a" * 32,
        agent="agent_0",
        sequence=1,
        produced_steps=1,
        actor_index=0,
        slot=0,
        epoch=0,
        before=0,
        owned=1,
        rows=2,
        checksum=0,
    )
    return frame_of(segment, {"reward": np.zeros(1, np.float32)})


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    town.close()


def strangers_keys(town: Town) -> Keys:
    """Keys of another run, but for the server's public one, which is no secret."""
    other = town.directory / "other"
    make_keys(other)
    shutil.copy(town.directory / "own" / "server.public", other / "server.public")
    return read_keys(other)


def test_member_is_heard_and_answered_on_every_link(town: Town) -> None:
    assert town.visit(read_keys(town.directory / "own")) == ["notice", "welcome"]
    assert {"hello", "segment"} == set(town.heard)
    assert town.count("bad_keys") == town.count("bad_handshakes") == 0


def test_client_without_keys_gets_nothing_in_or_out(town: Town) -> None:
    """Not even the broadcasts; each of the three sockets counts it."""
    assert town.visit(None) == []
    assert town.heard == []
    for link in (town.requests, town.segments, town.broadcasts):
        town.until(lambda link=link: link.counters["bad_handshakes"] > 0)


def test_client_with_a_strangers_key_gets_nothing_in_or_out(town: Town) -> None:
    """It knows the server, the server does not know it."""
    assert town.visit(strangers_keys(town)) == []
    assert town.heard == []
    for link in (town.requests, town.segments, town.broadcasts):
        town.until(lambda link=link: link.counters["bad_keys"] > 0)


def test_member_does_not_speak_to_a_server_with_another_key(town: Town) -> None:
    """Somebody else who listens at the address learns nothing: not even the first message arrives."""
    make_keys(town.directory / "impostor")
    wrong_server = town.directory / "wrong"
    shutil.copytree(town.directory / "own", wrong_server)
    shutil.copy(town.directory / "impostor" / "server.public", wrong_server / "server.public")
    assert town.visit(read_keys(wrong_server)) == []
    assert town.heard == []


def test_added_member_is_known_at_once(town: Town) -> None:
    """Without a restart of the services that listen."""
    secret = add_member(town.directory / "own", "ada")
    adas = town.directory / "ada"
    adas.mkdir()
    shutil.copy(secret, adas / "member.secret")
    shutil.copy(town.directory / "own" / "server.public", adas / "server.public")
    assert town.visit(read_keys(adas)) == ["notice", "welcome"]


def test_members_pass_after_the_members_file_was_damaged(town: Town) -> None:
    """Those known before may still come, and nobody else."""
    (town.directory / "own" / "members.public").write_text("oops\n")
    assert town.visit(strangers_keys(town)) == []
    assert town.visit(read_keys(town.directory / "own")) == ["notice", "welcome"]


@pytest.mark.parametrize("data", [b"\0" * 500, b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(range(256)) * 8])
def test_random_bytes_are_counted_and_nothing_else(town: Town, data: bytes) -> None:
    for link in (town.requests, town.segments, town.broadcasts):
        host, port = reach(link).removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(data)
        town.until(lambda link=link: link.counters["bad_handshakes"] + link.counters["disconnects"] > 0)
    assert town.heard == []
    assert town.visit(read_keys(town.directory / "own")) == ["notice", "welcome"]


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:*", "tcp://*:*"])
def test_listening_beyond_this_machine_without_keys_is_refused(endpoint: str) -> None:
    loop = Loop()
    network = Network(loop, max_message_bytes=LIMIT)
    with pytest.raises(ConfigError, match="can be reached from other machines, and there are no keys"):
        RequestReceiver(network, endpoint, {}, name="desk")
    network.close()
    loop.close()


def test_listening_at_a_name_says_what_to_set(tmp_path: Path) -> None:
    """libzmq listens at addresses; names are for those who connect."""
    make_keys(tmp_path)
    loop = Loop()
    network = Network(loop, max_message_bytes=LIMIT, keys=read_keys(tmp_path))
    with pytest.raises(ConfigError, match=r"set endpoints.listen_on to one, or to 0\.0\.0\.0"):
        RequestReceiver(network, "tcp://param_server:5703", {}, name="desk")
    network.close()
    loop.close()


def test_listening_address_takes_the_port_of_the_endpoint() -> None:
    assert listening_address("tcp://replay:5701", "0.0.0.0") == "tcp://0.0.0.0:5701"
    assert listening_address("tcp://127.0.0.1:5701", "") == "tcp://127.0.0.1:5701"
    assert listening_address("ipc:///tmp/x", "0.0.0.0") == "ipc:///tmp/x"


def test_network_of_a_config_without_its_keys_says_so(tmp_path: Path) -> None:
    config = load_config(None, [f"security.keys={tmp_path / 'nowhere'}"], environment={})
    loop = Loop()
    with pytest.raises(ConfigError, match="is missing; `rookery keys make"):
        Network.of(config, loop)
    loop.close()
