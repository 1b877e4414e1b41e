from __future__ import annotations

import numpy as np
import pytest

from shared.codec import Array, checksum
from shared.errors import BadMessage
from shared.messages import Weights
from shared.weights_state import Applied, NeedsSnapshot, Old, WeightsState

State = dict[str, Array]


def state_of(w: float, b: float) -> State:
    return {"w": np.full((2, 2), w, np.float32), "b": np.full(2, b, np.float32)}


def weights(version: int, result: State, base: int | None = None, agent: str = "a") -> Weights:
    total = checksum(result[name] for name in sorted(result))
    return Weights(agent=agent, version=version, updates=version * 10, base=base, checksum=total)


def held(version: int = 1) -> WeightsState:
    state = WeightsState("a")
    full = state_of(1, 2)
    assert isinstance(state.apply(weights(version, full), full), Applied)
    return state


def test_state_with_a_full_version_takes_a_copy() -> None:
    """The arrays are views on frames: what is held does not change with them."""
    state, full = WeightsState("a"), state_of(1, 2)
    outcome = state.apply(weights(3, full), full)
    assert isinstance(outcome, Applied)
    full["w"][:] = 9
    assert (outcome.version, outcome.updates, outcome.tensors["w"][0, 0], state.version) == (3, 30, 1, 3)


def test_state_with_half_precision_holds_float32() -> None:
    """What was sent as float16 is held, and checksummed, as float32."""
    half = {"w": np.array([1 / 3], np.float16)}
    outcome = WeightsState("a").apply(weights(1, {"w": half["w"].astype(np.float32)}), half)
    assert isinstance(outcome, Applied)
    assert outcome.tensors["w"].dtype == np.float32


def test_state_with_a_delta_on_its_full_version_has_both() -> None:
    """Changed tensors are new, the others are the base's; a second delta builds on the base again."""
    state = held()
    for version in (2, 5):
        outcome = state.apply(
            weights(version, state_of(version, 2), base=1), {"w": state_of(version, 2)["w"]}
        )
        assert isinstance(outcome, Applied)
        assert (outcome.tensors["w"][0, 0], outcome.tensors["b"][0]) == (version, 2)


@pytest.mark.parametrize("version", [2, 3])
def test_state_with_an_older_or_equal_version_stays(version: int) -> None:
    """Versions never go back, in full or as a delta."""
    state = held(3)
    assert state.apply(weights(version, state_of(7, 7)), state_of(7, 7)) == Old(3)
    assert state.apply(weights(version, state_of(7, 7), base=1), state_of(7, 7)) == Old(3)
    assert state.version == 3


def test_state_without_the_base_asks_for_it_and_then_applies_what_waited() -> None:
    """The base comes as a snapshot; the delta that asked for it is not lost."""
    state = WeightsState("a")
    outcome = state.apply(weights(9, state_of(9, 2), base=7), {"w": state_of(9, 2)["w"]})
    assert isinstance(outcome, NeedsSnapshot)
    assert outcome.version == 7
    outcome = state.apply(weights(7, state_of(1, 2)), state_of(1, 2))
    assert isinstance(outcome, Applied)
    assert (outcome.version, outcome.tensors["w"][0, 0], outcome.tensors["b"][0]) == (9, 9, 2)


def test_state_newer_than_the_base_still_takes_it_as_base() -> None:
    """After a snapshot of a version between two full ones, the next base is older than what is held."""
    state = held(8)
    assert isinstance(
        state.apply(weights(9, state_of(9, 2), base=7), {"w": state_of(9, 2)["w"]}), NeedsSnapshot
    )
    assert state.version == 8
    outcome = state.apply(weights(7, state_of(1, 2)), state_of(1, 2))
    assert isinstance(outcome, Applied)
    assert outcome.version == state.version == 9


def test_state_that_gets_a_newer_snapshot_than_the_base_goes_on_from_there() -> None:
    """A refused base is replaced by the newest version; what waited is forgotten."""
    state = WeightsState("a")
    state.apply(weights(9, state_of(9, 2), base=7), {"w": state_of(9, 2)["w"]})
    outcome = state.apply(weights(10, state_of(3, 3)), state_of(3, 3))
    assert isinstance(outcome, Applied)
    assert outcome.version == 10
    assert state.apply(weights(7, state_of(1, 2)), state_of(1, 2)) == Old(10)


def test_state_with_a_wrong_checksum_asks_for_the_newest() -> None:
    """Damaged weights are never given out, and nothing is built on a doubtful base."""
    state, damaged = held(), state_of(5, 5)
    outcome = state.apply(weights(2, state_of(4, 4)), damaged)
    assert isinstance(outcome, NeedsSnapshot)
    outcome = state.apply(weights(3, state_of(4, 2), base=1), {"w": damaged["w"]})
    assert isinstance(outcome, NeedsSnapshot)
    assert outcome.version is None
    assert state.version == 1
    assert isinstance(state.apply(weights(4, state_of(4, 4)), state_of(4, 4)), Applied)


def test_state_with_a_waiting_delta_that_is_damaged_still_uses_the_base() -> None:
    """The snapshot itself is newer than nothing."""
    state = WeightsState("a")
    state.apply(weights(9, state_of(8, 8), base=7), {"w": state_of(9, 2)["w"]})
    outcome = state.apply(weights(7, state_of(1, 2)), state_of(1, 2))
    assert isinstance(outcome, Applied)
    assert outcome.version == state.version == 7


@pytest.mark.parametrize(
    "arrays", [{"w": np.ones(4, np.float32)}, {"x": np.ones(1, np.float32)}, {"w": np.ones((2, 2), np.int32)}]
)
def test_state_with_a_delta_of_another_layout_asks_for_the_newest(arrays: State) -> None:
    """The same bytes in another shape pass a checksum but would not fit the network."""
    state = held()
    outcome = state.apply(weights(2, state_of(1, 2) | arrays, base=1), arrays)
    assert isinstance(outcome, NeedsSnapshot)
    assert outcome.version is None


def test_state_with_weights_of_another_agent_refuses_them() -> None:
    """Agent N's weights reach only agent N's policy."""
    with pytest.raises(BadMessage, match="'b' where those of 'a'"):
        WeightsState("a").apply(weights(1, state_of(1, 1), agent="b"), state_of(1, 1))
