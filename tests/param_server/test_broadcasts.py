from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.param_server.broadcasts import Broadcast, BroadcastDType, BroadcastEncoder
from services.param_server.version_file import StoredVersion, frozen_tensors, tensors_checksum
from shared.codec import Array
from shared.messages import Weights
from shared.weights_state import Applied, NeedsSnapshot, WeightsState


def stored(version: int, token: int = 1, **tensors: Any) -> StoredVersion:
    own = frozen_tensors({name: np.asarray(value, np.float32) for name, value in tensors.items()})
    return StoredVersion("a", version, version * 10, tensors_checksum(own), own, token, f"p{version}")


def encoder(delta: bool = True, full_every: int = 20, dtype: BroadcastDType = "float32") -> BroadcastEncoder:
    return BroadcastEncoder(delta=delta, full_every=full_every, broadcast_dtype=dtype)


def message(sent: Broadcast) -> Weights:
    return Weights(
        agent=sent.agent, version=sent.version, updates=sent.updates, base=sent.base, checksum=sent.checksum
    )


def shape_of(sent: Broadcast) -> tuple[int | None, list[str]]:
    return sent.base, sorted(sent.tensors)


def test_encoder_without_delta_sends_everything_as_stored() -> None:
    """The default: full versions, the stored checksum, no copies."""
    own = stored(1, w=[1.0], b=[2.0])
    sent = encoder(delta=False).encode(own)
    assert shape_of(sent) == (None, ["b", "w"])
    assert sent.checksum == own.checksum
    assert sent.tensors["w"] is own.tensors["w"]


def test_encoder_with_delta_sends_what_differs_from_the_last_full_version() -> None:
    """Not from the version before: the newest message is enough."""
    deltas = encoder()
    deltas.encode(stored(1, w=[1.0], b=[2.0], c=[3.0]))
    assert shape_of(deltas.encode(stored(2, w=[5.0], b=[2.0], c=[3.0]))) == (1, ["w"])
    assert shape_of(deltas.encode(stored(3, w=[5.0], b=[6.0], c=[3.0]))) == (1, ["b", "w"])
    assert shape_of(deltas.encode(stored(4, w=[1.0], b=[2.0], c=[3.0]))) == (1, [])


def test_encoder_when_everything_changed_sends_a_full_version() -> None:
    """A delta of the same size would only need a base that a subscriber may not have."""
    deltas = encoder()
    deltas.encode(stored(1, w=[1.0], b=[2.0]))
    assert shape_of(deltas.encode(stored(2, w=[3.0], b=[4.0]))) == (None, ["b", "w"])
    assert shape_of(deltas.encode(stored(3, w=[3.0], b=[5.0]))) == (2, ["b"])


def test_encoder_after_full_every_versions_sends_a_full_one() -> None:
    """With full_every 3 every third version is full."""
    deltas = encoder(full_every=3)
    bases = [deltas.encode(stored(n, w=[float(n)], b=[0.0])).base for n in range(1, 8)]
    assert bases == [None, 1, 1, None, 4, 4, None]


def test_encoder_under_a_new_token_sends_a_full_version() -> None:
    """A new learner's first publish builds on nothing of the old one's."""
    deltas = encoder()
    deltas.encode(stored(1, w=[1.0], b=[0.0]))
    assert deltas.encode(stored(2, token=2, w=[1.0], b=[0.0])).base is None
    assert deltas.encode(stored(3, token=2, w=[1.0], b=[1.0])).base == 2


def test_encoder_with_another_layout_sends_a_full_version() -> None:
    """Other names or shapes cannot be a difference."""
    deltas = encoder()
    deltas.encode(stored(1, w=[1.0], b=[0.0]))
    assert deltas.encode(stored(2, w=[1.0, 1.0], b=[0.0])).base is None
    assert deltas.encode(stored(3, w=[1.0, 1.0], c=[0.0])).base is None


def test_encoder_with_a_repeat_sends_the_same_again() -> None:
    """A repeated or older version is answered with the newest message."""
    deltas = encoder()
    deltas.encode(stored(1, w=[1.0], b=[0.0]))
    second = deltas.encode(stored(2, w=[2.0], b=[0.0]))
    assert deltas.encode(stored(2, w=[2.0], b=[0.0])) is second
    assert deltas.encode(stored(1, w=[1.0], b=[0.0])) is second


def test_encoder_with_a_changed_sign_of_zero_sends_it() -> None:
    """0.0 and -0.0 are equal but not the same bytes, and the checksum is over bytes."""
    deltas = encoder()
    deltas.encode(stored(1, w=[0.0], b=[np.nan]))
    assert shape_of(deltas.encode(stored(2, w=[-0.0], b=[np.nan]))) == (1, ["w"])


def test_encoder_in_half_precision_casts_float32_and_spares_what_overflows() -> None:
    """A weight beyond float16 must not arrive as infinity."""
    sent = encoder(dtype="float16").encode(stored(1, w=[1 / 3], big=[1e6], inf=[np.inf]))
    assert {name: array.dtype.name for name, array in sent.tensors.items()} == {
        "w": "float16",
        "big": "float32",
        "inf": "float16",
    }


def test_encoder_base_is_served_after_the_store_has_pruned_it() -> None:
    """A subscriber that lacks the base of a delta can always be given it."""
    deltas = encoder()
    first = deltas.encode(stored(1, w=[1.0], b=[0.0]))
    deltas.encode(stored(2, w=[2.0], b=[0.0]))
    assert deltas.base("a", 1) is first
    assert deltas.base("a", 2) is None
    assert deltas.base("b", 1) is None


@settings(max_examples=100, deadline=None)
@given(
    versions=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, -0.0, 1 / 3, 1e6, np.nan]), min_size=3, max_size=3),
            st.sampled_from([1, 1, 1, 2]),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    dtype=st.sampled_from(["float32", "float16"]),
    delta=st.booleans(),
)
def test_subscriber_that_misses_messages_always_ends_with_the_published_state(
    versions: list[tuple[list[float], int, bool]], dtype: BroadcastDType, delta: bool
) -> None:
    """Whatever is lost, after each message that arrives the state is the server's, in broadcast precision."""
    server, state, token = encoder(delta, 4, dtype), WeightsState("a"), 1
    for version, (values, step, arrives) in enumerate(versions, start=1):
        token += step - 1
        own = stored(version, token, **dict(zip("abc", values, strict=True)))
        sent = server.encode(own)
        if not arrives:
            continue
        outcome = state.apply(message(sent), sent.tensors)
        if isinstance(outcome, NeedsSnapshot):
            assert outcome.version is not None
            base = server.base("a", outcome.version)
            assert base is not None
            outcome = state.apply(message(base), base.tensors)
        assert isinstance(outcome, Applied)
        assert (outcome.version, state.version) == (version, version)
        expected: dict[str, Array] = {
            name: array if dtype == "float32" or array == 1e6 else array.astype(np.float16).astype(np.float32)
            for name, array in own.tensors.items()
        }
        assert {name: array.tobytes() for name, array in outcome.tensors.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_snapshot_of_the_newest_version_serves_as_base(dtype: BroadcastDType) -> None:
    """A snapshot has the broadcast's precision, so that a delta on it gives the announced checksum."""
    server, state = encoder(dtype=dtype), WeightsState("a")
    own = stored(1, w=[1 / 3], b=[0.1])
    server.encode(own)
    snapshot = server.full(own)
    assert isinstance(state.apply(message(snapshot), snapshot.tensors), Applied)
    sent = server.encode(stored(2, w=[1 / 3], b=[0.2]))
    assert sent.base == 1
    assert isinstance(state.apply(message(sent), sent.tensors), Applied)
