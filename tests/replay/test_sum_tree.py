"""The sum tree against plain running sums."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.replay.kernels import stratified_targets
from services.replay.sum_tree import SumTree

VALUES = st.one_of(st.just(0.0), st.floats(np.float32(1e-12), np.float32(1e12), width=32))


def found_by(tree: SumTree, targets: np.ndarray) -> np.ndarray:
    return drawn_by(tree, targets)[0]


def drawn_by(tree: SumTree, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    found, values = np.empty(len(targets), np.int64), np.empty(len(targets), np.float32)
    return found, values, tree.draw(targets.copy(), found, values)


@given(st.lists(VALUES, min_size=1, max_size=300), st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_draw_any_values_matches_running_sum(values: list[float], fractions: list[float]) -> None:
    """Each target finds the leaf that a running sum over all leaves finds, up to rounding at the borders."""
    leaves = np.array(values, np.float32)
    tree = SumTree(len(leaves))
    tree.rebuild(leaves)
    if tree.total == 0:
        return
    targets = np.array(fractions) * tree.total
    ends = leaves.cumsum(dtype=np.float64)
    found, drawn, smallest = drawn_by(tree, targets)
    np.testing.assert_array_equal(drawn, leaves[found])
    assert smallest == drawn.min()
    for target, leaf in zip(targets, found, strict=True):
        slack = 1e-9 * tree.total
        assert leaves[leaf] > 0
        assert ends[leaf] - leaves[leaf] - slack <= target <= ends[leaf] + slack


@pytest.mark.parametrize("capacity", [1, 15, 16, 17, 255, 256, 257, 1025, 16_384, 70_001])
def test_sums_after_many_sets_equal_rebuilt_tree(capacity: int) -> None:
    """Sets in any order, ranges and a rebuild end in bit-identical sums: nothing drifts."""
    rng = np.random.default_rng(capacity)
    tree, leaves = SumTree(capacity), np.zeros(capacity, np.float32)
    for _ in range(50):
        indices = rng.integers(0, capacity, 64)
        values = (rng.random(64) * 10.0 ** rng.integers(-9, 9)).astype(np.float32)
        tree.set(indices, values)
        leaves[indices] = values
        start = int(rng.integers(0, capacity))
        block = rng.random(min(50, capacity - start), dtype=np.float32)
        tree.set_range(start, block)
        leaves[start : start + len(block)] = block
    fresh = SumTree(capacity)
    fresh.rebuild(leaves)
    assert tree.total == fresh.total
    targets = rng.random(1000) * tree.total
    np.testing.assert_array_equal(found_by(tree, targets), found_by(fresh, targets))
    np.testing.assert_array_equal(tree.get(np.arange(capacity)), leaves)


def test_root_after_a_hundred_million_updates_equals_sum_of_leaves() -> None:
    """10^8 updates over twelve orders of magnitude leave the root within 1e-9 of the exact sum."""
    rng, tree = np.random.default_rng(1), SumTree(2**16)
    size = 100_000
    values = (10.0 ** rng.uniform(-6, 6, 4 * size)).astype(np.float32)
    indices = rng.integers(0, tree.capacity, 4 * size)
    for n in range(1000):
        start = n * 9973 % (3 * size)
        tree.set_checked(indices[start : start + size], values[start : start + size])
    exact = math.fsum(tree.get(np.arange(tree.capacity)).tolist())
    assert abs(tree.total - exact) <= 1e-9 * exact


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_draw_at_the_edges_never_returns_zero_leaf(seed: int, scale: float) -> None:
    """Targets on and beyond every border of a sparse tree land on leaves above 0."""
    rng = np.random.default_rng(seed)
    leaves = (np.where(rng.random(20_000) < 0.01, rng.random(20_000), 0.0) * scale).astype(np.float32)
    leaves[rng.integers(20_000)] = scale
    tree = SumTree(len(leaves))
    tree.rebuild(leaves)
    ends = leaves.cumsum(dtype=np.float64)
    edges = np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), [0.0, tree.total]])
    assert (drawn_by(tree, edges)[1] > 0).all()


def test_draw_values_of_unlike_size_never_returns_zero_leaf() -> None:
    """Huge beside tiny leaves in one family, where adding in another order rounds otherwise."""
    rng = np.random.default_rng(3)
    leaves = (10.0 ** rng.uniform(-20, 20, 4096)).astype(np.float32)
    leaves[rng.random(4096) < 0.7] = 0.0
    tree = SumTree(4096)
    tree.rebuild(leaves)
    ends = leaves.cumsum(dtype=np.float64)
    edges = np.concatenate(
        [np.nextafter(ends, side) for side in (0, np.inf)] + [ends, tree.total * rng.random(10**5)]
    )
    found, drawn, _smallest = drawn_by(tree, edges)
    assert (drawn > 0).all()
    np.testing.assert_array_equal(drawn, leaves[found])


def test_set_duplicate_indices_last_wins() -> None:
    """Of two values for one leaf in one call the last one stays, in the leaf and in the sums."""
    tree = SumTree(5000)
    tree.set(np.array([4000, 3, 4000]), np.array([1.0, 2.0, 5.0], np.float32))
    assert tree.get(np.array([4000])).tolist() == [5.0]
    assert tree.total == 7.0


def test_set_outside_the_tree_raises() -> None:
    """A leaf that does not exist is refused before anything is written."""
    tree = SumTree(5)
    with pytest.raises(IndexError, match="in a tree of 5"):
        tree.set(np.array([1, 5]), np.ones(2, np.float32))
    assert tree.total == 0.0


def test_draw_empty_tree_raises() -> None:
    """A tree of zeros refuses to draw instead of inventing a leaf."""
    with pytest.raises(ValueError, match="nothing to draw"):
        drawn_by(SumTree(10), np.array([0.0]))


def test_draw_a_million_times_follows_values() -> None:
    """The frequencies of 10^6 independent draws pass a chi-square test against the exact probabilities."""
    rng = np.random.default_rng(0)
    leaves = rng.random(2000, dtype=np.float32)
    leaves[::3] = 0.0
    tree = SumTree(2000)
    tree.rebuild(leaves)
    counts = np.bincount(found_by(tree, rng.random(10**6) * tree.total), minlength=2000)
    live = leaves > 0
    expected = leaves[live] / math.fsum(leaves.tolist()) * 10**6
    statistic = ((counts[live] - expected) ** 2 / expected).sum()
    freedom = live.sum() - 1
    assert counts[~live].sum() == 0
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_targets_one_in_each_part_and_a_function_of_key_and_draw() -> None:
    """Draw i puts one target into each equal part; the same draw repeats, other draws and keys do not."""
    key, other = np.array([1, 2], np.uint64), np.array([1, 3], np.uint64)
    made = []
    for a_key, draw in ((key, 5), (key, 5), (key, 6), (other, 5)):
        targets = np.empty(1000)
        stratified_targets(a_key, draw, 500.0, targets)
        np.testing.assert_array_equal(np.floor(targets * 2), np.arange(1000))
        made.append(targets)
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).all()
    assert (made[0] != made[3]).all()


def test_targets_over_many_draws_are_uniform_within_their_part() -> None:
    """10^6 targets, each in its own part, spread evenly over it (chi-square over 100 bins)."""
    key, targets = np.array([7, 8], np.uint64), np.empty(1000)
    counts = np.zeros(100)
    for draw in range(1000):
        stratified_targets(key, draw, 1000.0, targets)
        counts += np.bincount((targets % 1.0 * 100).astype(int), minlength=100)
    statistic = ((counts - 10_000) ** 2 / 10_000).sum()
    assert abs(statistic - 99) < 4 * np.sqrt(2 * 99)
