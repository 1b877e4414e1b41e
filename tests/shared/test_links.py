from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from shared.codec import Received, encode
from shared.errors import BadMessage, PeerSilent, Refused, RookeryError, SpecMismatch, StaleToken
from shared.layout import Array, Arrays, Block
from shared.links.broadcast import NOTICES, Broadcaster, BroadcastListener, weights_topic
from shared.links.network import Network
from shared.links.requests import Incoming, RequestReceiver, RequestSender
from shared.links.segments import SegmentReceiver, SegmentSender
from shared.loop import Loop
from shared.messages import (
    ControlRequest,
    Done,
    Hello,
    Message,
    Publish,
    RunNotice,
    Segment,
    SpecRequest,
    StatusRequest,
    StreamMarks,
    Token,
    Weights,
    Welcome,
)
from shared.segment_frame import SegmentFrame, SegmentHead, frame_of

RUN = "this run"
INC = "ab" * 16
LIMIT = 1 << 20
WAIT_S = 10.0
Handlers = dict[str, Callable[[Any, Incoming], None]]

# A greeting of libzmq's own protocol with a security mechanism that nobody speaks.
BOGUS_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"BOGUS".ljust(20, b"\0") + bytes(32)
GARBAGE = {
    "greeting": BOGUS_GREETING,
    "zeros": bytes(500),
    "http": b"GET / HTTP/1.1\r\nHost: rookery\r\nUser-Agent: a browser that is lost\r\n\r\n" * 3,
    "noise": np.random.default_rng(0).bytes(4_000),
}


class Wiring:
    """One loop and one context; makes both ends of each link and closes them in the end."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.networks: dict[int, Network] = {}  # by their limit on messages
        self.context = self.network().context
        self._kept: list[Any] = []  # a socket must be closed before it is forgotten

    def network(self, limit: int = LIMIT) -> Network:
        if limit not in self.networks:
            self.networks[limit] = Network(self.loop, max_message_bytes=limit)
        return self.networks[limit]

    def raw(self, kind: int) -> zmq.Socket[bytes]:
        self._kept.append(self.context.socket(kind))
        return self._kept[-1]

    def receiver(self, handlers: Handlers, endpoint: str = "", limit: int = LIMIT) -> RequestReceiver:
        receiver = RequestReceiver(
            self.network(limit), endpoint or "tcp://127.0.0.1:*", handlers, name="desk"
        )
        receiver.run = RUN
        return receiver

    def sender(self, endpoint: str, identity: str = "peer", run: str = RUN) -> RequestSender:
        sender = RequestSender(self.network(), endpoint, identity=identity)
        sender.run = run
        return sender

    def segment_receiver(
        self, on_segment: Callable[[SegmentHead, Block], None], endpoint: str = "", limit: int = LIMIT
    ) -> SegmentReceiver:
        return SegmentReceiver(self.network(limit), endpoint or "tcp://127.0.0.1:*", on_segment, run=RUN)

    def segment_sender(self, endpoint: str, queue: int = 10) -> SegmentSender:
        sender = SegmentSender(self.network(), endpoint, queue=queue)
        self._kept.append(sender)
        return sender

    def broadcaster(self, endpoint: str = "tcp://127.0.0.1:*", run: str = RUN) -> Broadcaster:
        return Broadcaster(self.network(), endpoint, run=run)

    def listener(self, endpoint: str, **callbacks: Any) -> BroadcastListener:
        return BroadcastListener(self.network(), endpoint, run=RUN, **callbacks)

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.loop.turn_until(condition, WAIT_S), "this did not happen in time"

    def answer_of(
        self, sender: RequestSender, message: Any, arrays: Arrays | None = None, **times: float
    ) -> Received | RookeryError:
        outcome: list[Received | RookeryError] = []
        sender.ask(message, arrays, on_reply=outcome.append, on_failure=outcome.append, **times)
        self.until(lambda: bool(outcome))
        return outcome[0]

    def send(self, sender: SegmentSender, segment: SegmentFrame) -> None:
        """Tries until the link takes it, once."""
        sent: list[bool] = []

        def try_once() -> bool:
            if not sent and sender.send(segment):
                sent.append(True)
            return bool(sent)

        self.until(try_once)

    def close(self) -> None:
        for network in self.networks.values():
            network.close()
        self.loop.close()


@pytest.fixture
def wiring() -> Iterator[Wiring]:
    wiring = Wiring()
    yield wiring
    wiring.close()


def endpoint_of(link: Any) -> str:
    return str(link._socket.last_endpoint.decode())


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def port_of(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])


def wait_until_free(endpoint: str) -> None:
    """libzmq gives a port back a moment after the socket was closed."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port_of(endpoint)))
            except OSError:
                continue
            return
    raise AssertionError(f"{endpoint} stays taken")


def segment(sequence: int = 1, arrays: Arrays | None = None, run: str = RUN) -> SegmentFrame:
    head = Segment(
        run=run,
        incarnation=INC,
        agent="agent_0",
        sequence=sequence,
        produced_steps=4,
        actor_index=0,
        slot=0,
        epoch=0,
        before=0,
        owned=4,
        rows=5,
        checksum=0,
    )
    return frame_of(head, arrays or {})


def weights(agent: str, version: int) -> Weights:
    return Weights(agent=agent, version=version, updates=0, checksum=0)


def notice(epochs: int) -> RunNotice:
    return RunNotice(state="running", epochs=epochs, agent_steps=0, learners={}, versions={})


class Desk:
    """Answers every question with Done and keeps what it was asked."""

    def __init__(self) -> None:
        self.seen: list[Incoming] = []
        self.receiver: RequestReceiver | None = None

    def answer(self, message: Any, incoming: Incoming) -> None:
        self.seen.append(incoming)
        assert self.receiver is not None
        self.receiver.reply(incoming.peer, Done(request=message.request))

    def open(self, wiring: Wiring, endpoint: str = "", limit: int = LIMIT) -> RequestReceiver:
        kinds = ("status_request", "publish", "spec_request")
        self.receiver = wiring.receiver(dict.fromkeys(kinds, self.answer), endpoint, limit)
        return self.receiver


# --- questions and answers ------------------------------------------------------------------------------


def test_question_with_arrays_is_answered(wiring: Wiring) -> None:
    """The handler gets the message, its arrays and its peer; the asker gets the answer to its question."""
    desk = Desk()
    sender = wiring.sender(endpoint_of(desk.open(wiring)), identity="learner")
    message = Publish(token=Token(agent="a", number=1), publish_id="p", updates=3)
    answer = wiring.answer_of(sender, message, {"w": np.arange(3)}, timeout_s=7.0)
    assert isinstance(answer, Received)
    assert isinstance(answer.message, Done)
    assert answer.message.run == RUN
    (seen,) = desk.seen
    assert (seen.peer, seen.message.run, seen.message.deadline_s) == (b"learner", RUN, 7.0)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(seen.received.arrays["w"], np.arange(3))
    assert sender.waiting == 0


def test_questions_of_several_senders_are_answered_each_to_its_own(wiring: Wiring) -> None:
    """Answers find the right peer and the right question."""
    desk = Desk()
    endpoint = endpoint_of(desk.open(wiring))
    senders = [wiring.sender(endpoint, identity=f"peer-{number}") for number in range(3)]
    answers: list[tuple[int, int]] = []
    for number, sender in enumerate(senders):
        for _ in range(5):
            sender.ask(
                StatusRequest(),
                on_reply=lambda got, number=number: answers.append((number, got.message.request)),
            )
    wiring.until(lambda: len(answers) == 15)
    assert sorted(answers) == [(number, request) for number in range(3) for request in range(1, 6)]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (Refused("not_yet", "later"), Refused, "not_yet"),
        (StaleToken("newer learner"), StaleToken, "stale_token"),
        (SpecMismatch("wrong shape"), Refused, "bad_message"),
        (BadMessage("nonsense"), Refused, "bad_message"),
    ],
)
def test_handler_that_refuses_answers_with_its_code(
    wiring: Wiring, error: RookeryError, kind: type[Refused], code: str
) -> None:
    """Refusals and bad contents become an answer with a code and the reason, counted by code."""

    def refuse(_message: object, _incoming: Incoming) -> None:
        raise error

    receiver = wiring.receiver({"status_request": refuse})
    answer = wiring.answer_of(wiring.sender(endpoint_of(receiver)), StatusRequest())
    assert type(answer) is kind
    assert isinstance(answer, Refused)
    assert (answer.code, str(answer)) == (code, str(error))
    assert receiver.counters[f"refused.{code}"] == 1


def test_question_of_another_run_is_refused(wiring: Wiring) -> None:
    """A service of an older run that still lives hears that this is not its run."""
    desk = Desk()
    sender = wiring.sender(endpoint_of(desk.open(wiring)), run="another run")
    answer = wiring.answer_of(sender, StatusRequest())
    assert isinstance(answer, Refused)
    assert answer.code == "other_run"
    assert "another run" in str(answer)
    assert RUN in str(answer)
    assert desk.seen == []


def test_hello_of_no_run_is_answered(wiring: Wiring) -> None:
    """The first question of a service cannot know the run yet."""

    def welcome(message: Hello, incoming: Incoming) -> None:
        receiver.reply(
            incoming.peer, Welcome(request=message.request, run_id=RUN, state="running", lease_s=1.0)
        )

    receiver = wiring.receiver({"hello": welcome})
    sender = wiring.sender(endpoint_of(receiver), run="")
    received = sender.call(Hello(service="actor", instance="a", incarnation=INC))
    assert isinstance(received.message, Welcome)


def test_question_of_unknown_kind_is_refused(wiring: Wiring) -> None:
    """A service says that it does not answer this."""
    sender = wiring.sender(endpoint_of(Desk().open(wiring)))
    answer = wiring.answer_of(sender, ControlRequest(action="pause"))
    assert isinstance(answer, Refused)
    assert answer.code == "unknown_request"
    assert "desk does not answer control_request" in str(answer)


def test_bad_bytes_are_counted_and_answered_and_the_next_question_is_served(wiring: Wiring) -> None:
    """Bytes that are no message harm nobody."""
    desk = Desk()
    receiver = desk.open(wiring)
    raw = wiring.raw(zmq.DEALER)
    raw.connect(endpoint_of(receiver))
    for frames in ([b"\xff\x00nonsense"], [b""], [b"{}", b"x"], encode(StatusRequest(run=RUN))):
        raw.send_multipart(frames)
    answers: list[list[bytes]] = []
    wiring.loop.on_readable(raw, lambda: answers.append(raw.recv_multipart()))
    wiring.until(lambda: len(answers) == 4)
    assert receiver.counters["bad_messages"] == 3
    assert all(b"bad_message" in answer[0] for answer in answers[:3])
    assert b'"done"' in answers[3][0]


def test_bad_answer_is_counted_and_the_right_one_still_taken(wiring: Wiring) -> None:
    """The asking end survives bad bytes too."""

    def answer(message: Any, incoming: Incoming) -> None:
        receiver._socket.send_multipart([incoming.peer, b"nonsense"])
        receiver.reply(incoming.peer, Done(request=message.request))

    receiver = wiring.receiver({"status_request": answer})
    sender = wiring.sender(endpoint_of(receiver))
    assert isinstance(wiring.answer_of(sender, StatusRequest()), Received)
    assert sender.counters["bad_messages"] == 1


def test_question_to_a_receiver_that_starts_late_is_answered(wiring: Wiring) -> None:
    """The order in which services start does not matter."""
    endpoint = free_endpoint()
    sender = wiring.sender(endpoint)
    outcome: list[object] = []
    sender.ask(StatusRequest(), on_reply=outcome.append, on_failure=outcome.append, timeout_s=WAIT_S)
    wiring.loop.turn_until(lambda: bool(outcome), 0.1)
    assert outcome == []
    Desk().open(wiring, endpoint)
    wiring.until(lambda: bool(outcome))
    assert isinstance(outcome[0], Received)


def test_question_that_a_dead_receiver_took_is_repeated_to_its_successor(wiring: Wiring) -> None:
    """A question that was received and never answered is asked again after a restart."""
    taken: list[Incoming] = []
    receiver = wiring.receiver({"status_request": lambda _message, incoming: taken.append(incoming)})
    endpoint = endpoint_of(receiver)
    sender = wiring.sender(endpoint)
    outcome: list[object] = []
    sender.ask(
        StatusRequest(), on_reply=outcome.append, on_failure=outcome.append, timeout_s=WAIT_S, retry_s=0.2
    )
    wiring.until(lambda: bool(taken))
    receiver.close()
    wait_until_free(endpoint)
    desk = Desk()
    desk.open(wiring, endpoint)
    wiring.until(lambda: bool(outcome))
    assert isinstance(outcome[0], Received)
    assert desk.seen[0].message == taken[0].message
    assert sender.counters["repeats"] >= 1


def test_peer_that_restarts_with_its_identity_is_answered(wiring: Wiring) -> None:
    """A restarted peer takes over the place of the one that died."""
    endpoint = endpoint_of(Desk().open(wiring))
    first, second = wiring.sender(endpoint, "same"), None
    assert isinstance(wiring.answer_of(first, StatusRequest()), Received)
    second = wiring.sender(endpoint, "same")
    assert isinstance(wiring.answer_of(second, StatusRequest(), retry_s=0.3), Received)


def test_answer_that_comes_twice_is_taken_once(wiring: Wiring) -> None:
    """The second answer to a repeated question is counted as unexpected."""

    def twice(message: Any, incoming: Incoming) -> None:
        for _ in range(2):
            receiver.reply(incoming.peer, Done(request=message.request))

    receiver = wiring.receiver({"status_request": twice})
    sender = wiring.sender(endpoint_of(receiver))
    outcome: list[Received] = []
    sender.ask(StatusRequest(), on_reply=outcome.append)
    wiring.until(lambda: sender.counters["unexpected"] == 1)
    assert len(outcome) == 1


def test_question_past_its_deadline_is_a_silent_peer(wiring: Wiring) -> None:
    """Nobody there: the failure says who did not answer what, and nothing is asked any more."""
    endpoint = free_endpoint()
    sender = wiring.sender(endpoint)
    answer = wiring.answer_of(sender, StatusRequest(), timeout_s=0.3)
    assert isinstance(answer, PeerSilent)
    assert endpoint in str(answer)
    assert "status_request" in str(answer)
    assert sender.waiting == 0


def test_call_to_a_silent_peer_raises(wiring: Wiring) -> None:
    """`call` waits for the answer, but not forever, and not at all once the loop stops."""
    sender = wiring.sender(free_endpoint())
    with pytest.raises(PeerSilent):
        sender.call(StatusRequest(), timeout_s=0.2)
    wiring.loop.stop("asked to")
    with pytest.raises(PeerSilent, match="asked to"):
        sender.call(StatusRequest(), timeout_s=60.0)


def test_closed_sender_with_open_questions_lets_the_loop_go_on(wiring: Wiring) -> None:
    """Nothing is repeated through a closed socket."""
    sender = wiring.sender(free_endpoint())
    failures: list[RookeryError] = []
    sender.ask(
        StatusRequest(), on_reply=lambda _got: None, on_failure=failures.append, timeout_s=0.6, retry_s=0.05
    )
    sender.close()
    assert not wiring.loop.turn_until(lambda: False, 0.8)


def test_message_nobody_asked_for_goes_to_its_volunteer(wiring: Wiring) -> None:
    """What a peer sends on its own is dispatched by kind, or counted."""
    desk = Desk()
    receiver = desk.open(wiring)
    sender = wiring.sender(endpoint_of(receiver), "me")
    marks: list[Received] = []
    sender.volunteered["stream_marks"] = marks.append
    wiring.answer_of(sender, StatusRequest())
    assert receiver.reply(b"me", StreamMarks(incarnation=INC, marks={}))
    assert receiver.reply(b"me", notice(0))
    wiring.until(lambda: bool(marks) and sender.counters["unexpected"] == 1)


def test_answer_to_a_peer_that_is_gone_is_counted(wiring: Wiring) -> None:
    """The answering end never waits for anybody."""
    receiver = Desk().open(wiring)
    assert not receiver.reply(b"nobody", Done())
    assert receiver.counters["undeliverable"] == 1


def test_answers_to_a_peer_that_does_not_read_are_dropped_and_counted(wiring: Wiring) -> None:
    """A queue that is full is not waited for."""
    receiver = Desk().open(wiring)
    raw = wiring.raw(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, b"deaf")
    raw.setsockopt(zmq.RCVHWM, 1)
    raw.connect(endpoint_of(receiver))
    raw.send_multipart(encode(StatusRequest(run=RUN)))
    big = {"x": np.zeros(1 << 19, np.uint8)}
    wiring.until(lambda: receiver.reply(b"deaf", Done()))
    assert any(not receiver.reply(b"deaf", Done(), big) for _ in range(4_000))
    assert receiver.counters["undeliverable"] >= 1


def test_told_message_is_not_waited_for(wiring: Wiring) -> None:
    """`tell` says whether the message could be queued, no more."""
    told: list[Message] = []
    receiver = wiring.receiver({"status_request": lambda message, _incoming: told.append(message)})
    sender = wiring.sender(endpoint_of(receiver))
    assert sender.tell(StatusRequest())
    wiring.until(lambda: bool(told))
    assert sender.waiting == 0


def test_queue_to_nobody_that_is_full_drops_what_is_told(wiring: Wiring) -> None:
    """Questions to a peer that never comes are bounded and counted."""
    sender = wiring.sender(free_endpoint())
    assert any(not sender.tell(SpecRequest()) for _ in range(3_000))
    assert sender.counters["send_queue_full"] == 1


# --- segments -------------------------------------------------------------------------------------------


def test_segment_with_nobody_there_is_kept_and_the_loop_wakes_when_replay_appears(wiring: Wiring) -> None:
    """`send` says no, and the wait ends by itself once there is somebody to send to."""
    endpoint = free_endpoint()
    sender = wiring.segment_sender(endpoint)
    assert not sender.send(segment())
    got: list[tuple[SegmentHead, Block]] = []
    wiring.segment_receiver(lambda *pair: got.append(pair), endpoint)
    sent = segment(arrays={"x": np.arange(2)})
    wiring.send(sender, sent)
    wiring.until(lambda: bool(got))
    head, block = got[0]
    assert head == sent.head
    np.testing.assert_array_equal(block, sent.arrays.block)


def test_segments_over_the_queue_are_kept_by_the_sender(wiring: Wiring) -> None:
    """A replay that does not read fills the queues; `send` says no and the loop does not spin on it."""
    pull = wiring.raw(zmq.PULL)
    pull.set_hwm(1)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    sender = wiring.segment_sender(f"tcp://127.0.0.1:{port}", queue=2)
    big = segment(arrays={"x": np.zeros(1 << 19, np.uint8)})
    wiring.send(sender, big)
    assert any(not sender.send(big) for _ in range(1_000))
    used, looks = time.thread_time(), Counter[str]()
    wiring.loop.turn_until(lambda: bool(looks.update(["look"])), 0.1)
    assert looks["look"] <= 20
    assert time.thread_time() - used < 0.05


@pytest.mark.parametrize(
    "frames",
    [
        [b"nonsense"],
        encode(StatusRequest(run=RUN)),
        [segment(run="other").data],
        [segment().data[:-1]],
        [segment(3).data, b"more"],
        [segment(3).data, segment(4).data, segment(5).data],
    ],
    ids=["bytes", "kind", "run", "torn", "two frames", "three frames"],
)
def test_bad_segment_is_counted_and_dropped(wiring: Wiring, frames: list[Any]) -> None:
    """Nonsense, other messages, other runs and torn headers never reach the buffer; the next one does."""
    got: list[SegmentHead] = []
    receiver = wiring.segment_receiver(lambda message, _block: got.append(message))
    raw = wiring.raw(zmq.PUSH)
    raw.connect(endpoint_of(receiver))
    raw.send_multipart(frames)
    raw.send(segment(2).data)
    wiring.until(lambda: bool(got))
    assert got[0].sequence == 2
    assert receiver.counters["bad_segments"] == 1


def test_segment_that_the_buffer_refuses_is_counted(wiring: Wiring) -> None:
    """A handler's BadMessage is counted like bad bytes."""

    def refuse(_segment: SegmentHead, _block: Block) -> None:
        raise SpecMismatch("not the agent's columns")

    receiver = wiring.segment_receiver(refuse)
    sender = wiring.segment_sender(endpoint_of(receiver))
    wiring.send(sender, segment())
    wiring.until(lambda: receiver.counters["bad_segments"] == 1)


# --- what libzmq refuses --------------------------------------------------------------------------------


def test_oversize_frame_on_requests_ends_its_connection_and_a_good_peer_goes_on(wiring: Wiring) -> None:
    """libzmq drops the connection without a word; the watch counts it."""
    desk = Desk()
    receiver = desk.open(wiring, limit=1_000)
    good = wiring.sender(endpoint_of(receiver), "good")
    bad = wiring.sender(endpoint_of(receiver), "bad")
    assert isinstance(wiring.answer_of(good, StatusRequest()), Received)
    message = Publish(token=Token(agent="a", number=1), publish_id="p", updates=3)
    answer = wiring.answer_of(bad, message, {"w": np.zeros(10_000)}, timeout_s=0.5)
    assert isinstance(answer, PeerSilent)
    wiring.until(lambda: receiver.counters["disconnects"] >= 1)
    assert isinstance(wiring.answer_of(good, StatusRequest()), Received)
    assert [incoming.peer for incoming in desk.seen] == [b"good", b"good"]


def test_oversize_segment_ends_its_connection_and_a_good_peer_goes_on(wiring: Wiring) -> None:
    """Replay goes on storing what others send."""
    got: list[SegmentHead] = []
    receiver = wiring.segment_receiver(lambda message, _block: got.append(message), limit=1_000)
    good, bad = (wiring.segment_sender(endpoint_of(receiver)) for _ in range(2))
    wiring.send(bad, segment(arrays={"x": np.zeros(10_000)}))
    wiring.until(lambda: receiver.counters["disconnects"] >= 1)
    wiring.send(good, segment(2, {"x": np.zeros(2)}))
    wiring.until(lambda: bool(got))
    assert {message.sequence for message in got} == {2}


def send_garbage(wiring: Wiring, endpoint: str, counters: Counter[str], data: bytes) -> None:
    """Sends raw bytes, hangs up, and waits until somebody has noticed."""
    before = counters.total()
    with socket.create_connection(("127.0.0.1", port_of(endpoint))) as raw:
        with contextlib.suppress(OSError):  # it may have hung up on us already
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
        wiring.until(lambda: counters.total() > before)


@pytest.mark.parametrize("name", list(GARBAGE))
def test_garbage_on_requests_is_counted_and_a_good_peer_goes_on(wiring: Wiring, name: str) -> None:
    """Raw bytes on the ROUTER crash nothing."""
    receiver = Desk().open(wiring)
    send_garbage(wiring, endpoint_of(receiver), receiver.counters, GARBAGE[name])
    assert isinstance(wiring.answer_of(wiring.sender(endpoint_of(receiver)), StatusRequest()), Received)


@pytest.mark.parametrize("name", list(GARBAGE))
def test_garbage_on_segments_is_counted_and_a_good_peer_goes_on(wiring: Wiring, name: str) -> None:
    """Raw bytes on the PULL crash nothing."""
    got: list[SegmentHead] = []
    receiver = wiring.segment_receiver(lambda message, _block: got.append(message))
    send_garbage(wiring, endpoint_of(receiver), receiver.counters, GARBAGE[name])
    sender = wiring.segment_sender(endpoint_of(receiver))
    wiring.send(sender, segment())
    wiring.until(lambda: len(got) == 1)


@pytest.mark.parametrize("name", list(GARBAGE))
def test_garbage_on_broadcasts_is_counted_and_a_good_peer_goes_on(wiring: Wiring, name: str) -> None:
    """Raw bytes on the PUB crash nothing."""
    broadcaster = wiring.broadcaster()
    send_garbage(wiring, endpoint_of(broadcaster), broadcaster.counters, GARBAGE[name])
    got: list[RunNotice] = []
    wiring.listener(endpoint_of(broadcaster), on_notice=got.append)
    resend = wiring.loop.every(0.02, lambda: broadcaster.send(NOTICES, notice(1)), first_s=0.0)
    wiring.until(lambda: bool(got))
    resend.cancel()


def test_greeting_of_another_protocol_is_a_bad_handshake_on_every_bound_socket(wiring: Wiring) -> None:
    """What fails libzmq's handshake is counted by name."""
    for link in (Desk().open(wiring), wiring.segment_receiver(lambda *_pair: None), wiring.broadcaster()):
        send_garbage(wiring, endpoint_of(link), link.counters, BOGUS_GREETING)
        wiring.until(lambda link=link: link.counters["bad_handshakes"] == 1)


# --- broadcasts -----------------------------------------------------------------------------------------


def test_listener_for_agent_1_does_not_receive_agent_10(wiring: Wiring) -> None:
    """Topics match by prefix, and one agent's name may begin another's."""
    broadcaster = wiring.broadcaster()
    got: list[tuple[str, Array]] = []
    notices: list[RunNotice] = []
    wiring.listener(
        endpoint_of(broadcaster),
        on_weights=lambda message, arrays: got.append((message.agent, arrays["w"])),
        on_notice=notices.append,
        agents=["agent_1"],
    )

    def send_both() -> None:
        broadcaster.send(weights_topic("agent_10"), weights("agent_10", 1), {"w": np.ones(1)})
        broadcaster.send(weights_topic("agent_1"), weights("agent_1", 1), {"w": np.zeros(1)})
        broadcaster.send(NOTICES, notice(1))

    resend = wiring.loop.every(0.02, send_both, first_s=0.0)
    wiring.until(lambda: len(got) >= 3 and bool(notices))
    resend.cancel()
    assert {agent for agent, _array in got} == {"agent_1"}


def test_listener_with_several_versions_waiting_hands_on_the_newest_of_each_agent(wiring: Wiring) -> None:
    """Older weights in the queue are skipped, agent by agent."""
    broadcaster = wiring.broadcaster("inproc://broadcast")
    got: list[tuple[str, int]] = []
    listener = wiring.listener(
        "inproc://broadcast",
        on_weights=lambda message, _arrays: got.append((message.agent, message.version)),
        agents=["a", "b"],
    )
    resend = wiring.loop.every(0.01, lambda: broadcaster.send(weights_topic("a"), weights("a", 1)))
    wiring.until(lambda: bool(got))
    resend.cancel()
    wiring.loop.turn(block=False)
    got.clear()
    for version in range(2, 8):
        broadcaster.send(weights_topic("a"), weights("a", version))
        broadcaster.send(weights_topic("b"), weights("b", 10 * version))
    listener.receive()
    assert sorted(got) == [("a", 7), ("b", 70)]


def test_listener_ignores_another_run_and_bad_bytes(wiring: Wiring) -> None:
    """What is not of this run, or no message at all, is counted and not handed on."""
    publisher = wiring.raw(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    got: list[RunNotice] = []
    listener = wiring.listener(f"tcp://127.0.0.1:{port}", on_notice=got.append)

    def send_all() -> None:
        for run, epochs in (("other", 1), (RUN, 2)):
            frames = encode(notice(epochs).model_copy(update={"run": run}))
            publisher.send_multipart([NOTICES, *frames])
        publisher.send_multipart([NOTICES])
        publisher.send_multipart([NOTICES, b"nonsense"])
        publisher.send_multipart([NOTICES, *encode(Done(run=RUN))])

    resend = wiring.loop.every(0.02, send_all, first_s=0.0)
    wiring.until(lambda: bool(got) and listener.counters["unexpected"] > 0)
    resend.cancel()
    assert {message.epochs for message in got} == {2}
    assert listener.counters["other_run"] >= 1
    assert listener.counters["bad_messages"] >= 2


def test_closed_links_leave_nothing_in_the_loop(wiring: Wiring) -> None:
    """Each end gives back its sockets; the loop goes on without them."""
    receiver = Desk().open(wiring)
    segments = wiring.segment_receiver(lambda *_pair: None)
    broadcaster = wiring.broadcaster()
    sender = wiring.sender(endpoint_of(receiver))
    segment_sender = wiring.segment_sender(endpoint_of(segments))
    listener = wiring.listener(endpoint_of(broadcaster), on_notice=lambda _notice: None)
    for link in (sender, segment_sender, listener, receiver, segments, broadcaster):
        link.close()
    assert not wiring.loop.turn_until(lambda: False, 0.3)
