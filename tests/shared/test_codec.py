from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.codec import MAX_HEADER_BYTES, checksum, decode, encode
from shared.errors import BadMessage
from shared.layout import MAX_ARRAYS, pack
from shared.messages import (
    AgentStatus,
    AnyMessage,
    Batch,
    BufferStats,
    CheckpointChunk,
    CheckpointPiece,
    CheckpointRequest,
    ControlReply,
    ControlRequest,
    Done,
    EpochSummary,
    ErrorReply,
    FailureReport,
    Failures,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LearnerLease,
    LeaseGrant,
    LeaseRequest,
    Ledger,
    LedgerRequest,
    LimiterStats,
    Mark,
    Message,
    PermitRequest,
    PermitReturn,
    PhaseGrant,
    PhaseRequest,
    PriorityUpdate,
    Produced,
    ProducedRequest,
    Publish,
    Published,
    Release,
    ReplayStats,
    ReplayStatsRequest,
    Request,
    RoundGrant,
    RoundRequest,
    RunNotice,
    RunStatus,
    SampleRequest,
    Segment,
    ServiceStatus,
    SnapshotOrder,
    SnapshotRequest,
    SnapshotTaken,
    SpecRegistration,
    SpecRequest,
    Specs,
    StatusRequest,
    StreamMarks,
    StreamReport,
    Token,
    Weights,
    Welcome,
)
from shared.specs import AgentSpec, Continuous, Discrete, DType, vector_observation

INC = "0123456789abcdef" * 2
TOKEN = Token(agent="agent_1", number=7)
SPEC = AgentSpec(
    observation=vector_observation(3), stack=2, discrete=Discrete(n=4), continuous=Continuous(size=2)
)
SUMMARY = EpochSummary(number=3, epochs=4, env_steps=50, agent_steps=150, return_sums={"agent_0": -1.5})
SERVICE = ServiceStatus(
    service="learner",
    instance="learner-0",
    incarnation=INC,
    pid=12,
    host="here",
    up_s=1.5,
    seen_s=0.1,
    ready=True,
    done=False,
    holds="agent_0",
    waiting_for="",
    metrics={"loss": 0.5},
)
LIMITER = LimiterStats(
    blocked="samples",
    reason="too few steps",
    since_s=2.5,
    samples_per_insert=8.0,
    min_steps=100,
    tolerance_samples=50.0,
    ahead_samples=-3.5,
)
BUFFER = BufferStats(
    drawable_steps=1,
    capacity_steps=2,
    inserted_steps=3,
    sampled_steps=4,
    held_requests=5,
    stale_priorities=6,
    max_priority=7.5,
    limiter=LIMITER,
)
ONE_OF_EACH: list[Message] = [
    ErrorReply(request=1, code="other_run", reason="not this one"),
    Done(request=2),
    Segment(
        incarnation=INC,
        agent="agent_0",
        sequence=1,
        produced_steps=64,
        actor_index=0,
        slot=3,
        epoch=9,
        before=1,
        owned=4,
        rows=8,
        checksum=2**32 - 1,
    ),
    StreamReport(incarnation=INC, produced_steps={"agent_0": 64}, final=True),
    StreamMarks(
        incarnation=INC, marks={"agent_0": Mark(stored=4, acknowledged=2, gap=True)}, waiting_for="x"
    ),
    SampleRequest(token=TOKEN, draw=2**62, batch_size=256, beta=0.4),
    Batch(token=TOKEN, draw=0),
    PriorityUpdate(token=TOKEN, draw=3),
    PhaseRequest(token=TOKEN, round=4),
    PhaseGrant(round=4, draws=2**40),
    ReplayStatsRequest(),
    ReplayStats(buffers={"agent_0": BUFFER}, counters={"gaps": 3}, newest_snapshot=2),
    SnapshotOrder(number=2, deadline_s=600.0),
    SnapshotTaken(number=2, steps={"agent_0": 5}, size_bytes=2**40),
    LedgerRequest(closing=True),
    Ledger(produced=9, stored=8, in_flight=1, abandoned=0, duplicates_dropped=2, stored_twice=0, lost=-1),
    Hello(service="actor", instance="actor-0", incarnation=INC),
    Welcome(run_id="r", state="running", lease_s=5.0),
    SpecRegistration(specs={"agent_0": SPEC}),
    SpecRequest(deadline_s=3.0),
    Specs(specs={"agent_0": SPEC}),
    LeaseRequest(role="learner", instance="learner-0", incarnation=INC, agent="agent_0"),
    LeaseGrant(token=TOKEN, lease_s=5.0),
    RoundRequest(index=1, round=None),
    RoundGrant(round=5, versions={"agent_0": 5}),
    PermitRequest(token=TOKEN),
    PermitReturn(token=TOKEN),
    Heartbeat(
        service="actor",
        instance="actor-0",
        incarnation=INC,
        pid=1,
        host="here",
        up_s=0.5,
        index=3,
        metrics={"loss": float("inf")},
        epochs=SUMMARY,
    ),
    HeartbeatReply(state="paused", lease_held=False, epoch_summary=3, epochs=4, agent_steps=5),
    Release(instance="actor-0", incarnation=None),
    FailureReport(instance="learner-0", pid=7, reason="ended with code 1"),
    ProducedRequest(),
    Produced(steps={"a" * 32: 7}),
    Publish(token=TOKEN, publish_id="abc", updates=50),
    Published(version=4),
    SnapshotRequest(agent="agent_0", version=None),
    Weights(agent="agent_0", version=2, updates=100, base=1, checksum=5),
    CheckpointChunk(token=TOKEN, checkpoint_id="c", offset=0, total_bytes=10, checksum=1),
    CheckpointRequest(token=TOKEN, offset=4),
    CheckpointPiece(checkpoint_id="c", offset=0, total_bytes=10, checksum=1),
    ControlRequest(action="set", target="learner-0", values={"lr": 1e-4}),
    ControlReply(service="learner", instance="learner-0", state="running", ready=True),
    StatusRequest(),
    RunStatus(
        state="draining",
        run_id="r",
        elapsed_s=1.0,
        epochs=1,
        env_steps=2,
        agent_steps=3,
        services=(SERVICE,),
        agents={"agent_0": AgentStatus(version=1, updates=2, token=0, learner="", recent_return=None)},
        counters={"a": 1},
        failures={"learner-0": Failures(count=2, reason="ended with code 1", seen_s=0.5)},
    ),
    RunNotice(
        state="finished",
        epochs=1,
        agent_steps=2,
        learners={"agent_0": LearnerLease(number=1, incarnation=INC, live=True)},
        versions={"agent_0": 3},
    ),
]


def kind_of(message: Message) -> str:
    return str(message.kind)  # type: ignore[attr-defined]


def wire(message: Message, arrays: dict[str, np.ndarray] | None = None) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


def header(**fields: Any) -> bytes:
    return json.dumps({"kind": "done", "protocol": 1} | fields).encode()


def described(shape: list[int], name: str = "a", dtype: str = "float32") -> str:
    return f"{name} {dtype}[{','.join(str(side) for side in shape)}]"


ARRAYS = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9_./-]{1,8}", fullmatch=True),
    st.sampled_from(list(DType)).flatmap(
        lambda dtype: hnp.arrays(
            dtype.numpy, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
        )
    ),
    max_size=4,
)


def test_samples_cover_every_kind_of_message() -> None:
    """The round trip below leaves no kind out."""
    union = get_args(AnyMessage)[0]
    assert {type(message) for message in ONE_OF_EACH} == set(get_args(union))


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=kind_of)
def test_message_of_each_kind_comes_back_as_it_was(message: Message) -> None:
    """A header is the same message after the wire, whatever its kind."""
    received = decode(wire(message.model_copy(update={"run": "a run"})))
    assert received.message == message.model_copy(update={"run": "a run"})
    assert received.arrays == {}


@pytest.mark.parametrize("before", ["", "a run", "another run"])
@pytest.mark.parametrize("message", ONE_OF_EACH, ids=kind_of)
def test_header_stamped_on_its_way_is_that_of_a_stamped_message(message: Message, before: str) -> None:
    """Whatever its kind, stamped before or not: run, arrays, number and deadline are the new ones."""
    message, run = message.model_copy(update={"run": before}), 'a run "of mine" \N{SNOWMAN}\n'
    arrays = {"a": np.zeros(3)}
    stamp = {"run": run, "arrays": "a float64[3]"}
    assert encode(message, arrays, run)[0] == message.model_copy(update=stamp).model_dump_json().encode()
    assert encode(message)[0] == message.model_dump_json().encode()
    if isinstance(message, Request):
        stamp |= {"request": 77, "deadline_s": 2.5}
        expected = message.model_copy(update=stamp).model_dump_json().encode()
        assert encode(message, arrays, run, (77, 2.5))[0] == expected


@settings(max_examples=60, deadline=None)
@given(message=st.sampled_from(ONE_OF_EACH), arrays=ARRAYS)
def test_arrays_of_any_type_and_shape_come_back_bit_for_bit(
    message: Message, arrays: dict[str, np.ndarray]
) -> None:
    """Every type and shape survives, empty and 0-dimensional ones included, in their order."""
    received = decode(wire(message, arrays))
    assert list(received.arrays) == list(arrays)
    assert received.message.model_copy(update={"arrays": ""}) == message
    for name, array in arrays.items():
        found = received.arrays[name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "view",
    [
        np.arange(24.0).reshape(4, 6)[::2, ::-3],
        np.arange(24.0).reshape(4, 6).T,
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.broadcast_to(np.float32(3.0), (2, 3)),
    ],
    ids=["strided", "transposed", "fortran", "broadcast"],
)
def test_array_that_is_not_contiguous_comes_back_equal(view: np.ndarray) -> None:
    """Views of any layout are sent as the numbers they show."""
    np.testing.assert_array_equal(decode(wire(Done(), {"a": view})).arrays["a"], view)


def test_packed_arrays_are_sent_from_where_they_lie() -> None:
    """No copy is made on the way out: the frame is the block itself."""
    packed = pack({"a": np.zeros(4, np.uint8), "b": np.zeros(2)})
    frame = encode(Done(), packed)[1]
    packed["a"][:] = 7
    assert bytes(frame)[:4] == b"\x07" * 4


def test_other_arrays_are_copied_so_that_later_changes_do_not_travel() -> None:
    """What was encoded stays as it was, however long it waits in a queue."""
    array = np.zeros(4, np.uint8)
    frame = encode(Done(), {"a": array})[1]
    array[:] = 7
    assert bytes(frame) == b"\x00" * 4


def test_every_array_begins_at_a_multiple_of_64_bytes() -> None:
    """Aligned for any machine, and the gaps are zeros: nothing of our memory travels with them."""
    first, second = np.full(3, 255, np.uint8), np.full((2, 2), -1.0)
    data = wire(Done(), {"a": first, "b": second})[1]
    assert data == first.tobytes() + bytes(61) + second.tobytes()


@pytest.mark.parametrize("name", ["", "a b", "a;b", "ä", "x" * 129])
def test_array_name_that_cannot_travel_is_refused_where_it_is_sent(name: str) -> None:
    """A name that no header could carry is the sender's mistake."""
    with pytest.raises(ValueError, match="description of an array"):
        encode(Done(), {name: np.zeros(1)})


def test_zmq_frames_give_views_on_them() -> None:
    """What libzmq received is not copied either."""
    frames = [zmq.Frame(data) for data in wire(Done(), {"a": np.arange(3)})]
    received = decode(frames)
    assert np.shares_memory(received.arrays["a"], np.frombuffer(frames[1].buffer, np.int64))


@pytest.mark.parametrize("cut", [0, 1, 11])
def test_array_frame_of_the_wrong_length_is_a_bad_message(cut: int) -> None:
    """A frame that is shorter or longer than its announced array is refused."""
    head, data = wire(Done(), {"a": np.zeros(3, np.float32)})
    with pytest.raises(BadMessage, match=f"needs 12 bytes, its frame has {cut}"):
        decode([head, data[:cut]])
    with pytest.raises(BadMessage, match="its frame has 13"):
        decode([head, data + b"x"])


def test_frames_missing_or_too_many_are_a_bad_message() -> None:
    """The number of frames must be what the header announces."""
    frames = wire(Done(), {"a": np.zeros(3), "b": np.zeros(2)})
    for wrong in (frames[:1], [*frames, b""]):
        with pytest.raises(BadMessage, match=f"{len(wrong)} frames arrived, its header announces 2"):
            decode(wrong)
    with pytest.raises(BadMessage, match="2 frames arrived, its header announces 1"):
        decode([wire(Done())[0], b""])
    with pytest.raises(BadMessage, match="without frames"):
        decode([])


def test_header_over_the_limit_is_a_bad_message_before_it_is_parsed() -> None:
    """A valid header that is too long is refused by its length."""
    head = header(run="r") + b" " * MAX_HEADER_BYTES
    with pytest.raises(BadMessage, match="limit"):
        decode([head])


@pytest.mark.parametrize("protocol", [0, 2, "1", None])
def test_header_of_another_protocol_is_a_bad_message(protocol: object) -> None:
    """Another protocol number is refused, and the reason says which field."""
    with pytest.raises(BadMessage, match="protocol"):
        decode([header(protocol=protocol)])


@pytest.mark.parametrize(
    "fields",
    [{"kind": "nonsense"}, {"surprise": 1}, {"request": -1}, {"request": 2**63}, {"run": "x" * 65}],
    ids=["kind", "extra", "negative", "large", "long"],
)
def test_header_with_an_impossible_field_is_a_bad_message(fields: dict[str, object]) -> None:
    """Unknown kinds, unknown fields and values out of bounds are refused."""
    with pytest.raises(BadMessage):
        decode([header(**fields)])


def test_array_name_that_comes_twice_is_a_bad_message() -> None:
    """One name means one array."""
    head = header(arrays=f"{described([1])};{described([1])}")
    with pytest.raises(BadMessage, match="twice"):
        decode([head, bytes(68)])


@pytest.mark.parametrize(
    "text",
    ["a", "a float32", "a float32[", "a float32[-1]", "a float32[1,]", "a object[1]", "a float32[1];", ";"],
)
def test_nonsense_in_place_of_a_layout_is_a_bad_message(text: str) -> None:
    """What does not describe arrays is refused with the words that do not."""
    with pytest.raises(BadMessage):
        decode([header(arrays=text), bytes(4)])


def test_more_arrays_than_allowed_are_a_bad_message() -> None:
    """The number of arrays is bounded before they are described."""
    text = ";".join(described([0], f"a{n}") for n in range(MAX_ARRAYS + 2))
    with pytest.raises(BadMessage):
        decode([header(arrays=text), b""])


@pytest.mark.parametrize("shape", [[2**39], [2**39] * 8, [1 << 28, 2]])
def test_announced_shape_too_large_is_refused_before_anything_is_allocated(shape: list[int]) -> None:
    """A few bytes cannot make a receiver ask for much memory."""
    head = header(arrays=described(shape))
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match="limit"):
            decode([head, b""])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [[0, 2**39, 2**39], [2**39, 2**39, 0], [0] + [2**39] * 7])
def test_empty_shape_with_impossible_sides_is_a_bad_message(shape: list[int]) -> None:
    """A zero among huge sides makes no bytes, but numpy has no such array."""
    with pytest.raises(BadMessage):
        decode([header(arrays=described(shape)), b""])


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 2**20, 2**31, 2**39, 2**40 - 1]), max_size=8),
    dtype=st.sampled_from([dtype.value for dtype in DType]),
    data=st.binary(max_size=64),
)
def test_decode_of_any_announced_shape_raises_only_bad_message(
    shape: list[int], dtype: str, data: bytes
) -> None:
    """Whatever shape a header announces, the answer is an array of it or BadMessage."""
    try:
        received = decode([header(arrays=described(shape, dtype=dtype)), data])
    except BadMessage:
        return
    assert list(received.arrays["a"].shape) == shape
    assert received.arrays["a"].nbytes == len(data)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_decode_of_random_bytes_raises_only_bad_message(frames: list[bytes]) -> None:
    """Noise is BadMessage, never anything else."""
    with pytest.raises(BadMessage):
        decode(frames)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_of_damaged_messages_raises_only_bad_message(data: st.DataObject) -> None:
    """A real message with some bytes changed, cut out or put in is read or refused."""
    message = data.draw(st.sampled_from(ONE_OF_EACH))
    frames = wire(message, {"a": np.arange(3, dtype=np.float32), "b": np.zeros((2, 0), np.bool_)})
    place = data.draw(st.integers(0, len(frames) - 1))
    start = data.draw(st.integers(0, len(frames[place])))
    stop = data.draw(st.integers(start, min(len(frames[place]), start + 4)))
    frames[place] = frames[place][:start] + data.draw(st.binary(max_size=4)) + frames[place][stop:]
    with contextlib.suppress(BadMessage):
        decode(frames)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(message=st.sampled_from(ONE_OF_EACH), key=st.integers(0, 20), value=JSON)
def test_decode_of_headers_with_any_json_value_raises_only_bad_message(
    message: Message, key: int, value: object
) -> None:
    """Any JSON in any field is a message or BadMessage."""
    fields = json.loads(wire(message)[0])
    fields[sorted(fields)[key % len(fields)]] = value
    with contextlib.suppress(BadMessage):
        decode([json.dumps(fields).encode("utf-8", "surrogatepass")])


def test_checksum_of_arrays_depends_on_their_order_and_bytes_alone() -> None:
    """The layout in memory does not matter, the order of the arrays does."""
    a, b = np.arange(6).reshape(2, 3), np.ones(2)
    assert checksum([a, b]) == checksum([np.asfortranarray(a), b]) != checksum([b, a])


def test_counts_that_would_add_up_past_their_range_are_refused() -> None:
    """One poisoned summary must not make every later sum impossible to send."""
    fields = {"number": 1, "epochs": 1, "env_steps": 1, "agent_steps": 2**62, "return_sums": {}}
    heartbeat = {
        "kind": "heartbeat",
        "service": "actor",
        "instance": "x",
        "incarnation": "a" * 32,
        "pid": 1,
        "host": "h",
        "up_s": 1.0,
        "epochs": fields,
    }
    with pytest.raises(BadMessage, match="agent_steps"):
        decode([json.dumps(heartbeat).encode()])
