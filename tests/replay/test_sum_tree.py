"""The sum tree against plain running sums."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.replay.sum_tree import SumTree

VALUES = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))


@given(st.lists(VALUES, min_size=1, max_size=300), st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_draw_any_values_matches_running_sum(values: list[float], fractions: list[float]) -> None:
    """Each target finds the leaf that a running sum over all leaves finds, up to rounding at the borders."""
    leaves = np.array(values)
    tree = SumTree(len(leaves))
    tree.rebuild(leaves)
    if tree.total == 0:
        return
    targets = np.array(fractions) * tree.total
    ends = leaves.cumsum()
    for target, leaf in zip(targets, tree.draw(targets), strict=True):
        slack = 1e-9 * tree.total
        assert leaves[leaf] > 0
        assert ends[leaf] - leaves[leaf] - slack <= target <= ends[leaf] + slack


@pytest.mark.parametrize("capacity", [1, 15, 16, 17, 1024, 1025, 16_384, 70_001])
def test_sums_after_many_sets_equal_rebuilt_tree(capacity: int) -> None:
    """Sets, ranges and a rebuild end in bit-identical sums: nothing drifts."""
    rng = np.random.default_rng(capacity)
    tree, leaves = SumTree(capacity), np.zeros(capacity)
    for _ in range(50):
        indices, values = rng.integers(0, capacity, 64), rng.random(64) * 10.0 ** rng.integers(-9, 9)
        tree.set(indices, values)
        leaves[indices] = values
        start = int(rng.integers(0, capacity))
        block = rng.random(min(50, capacity - start))
        tree.set_range(start, block)
        leaves[start : start + len(block)] = block
    fresh = SumTree(capacity)
    fresh.rebuild(leaves)
    assert tree.total == fresh.total
    targets = rng.random(1000) * tree.total
    np.testing.assert_array_equal(tree.draw(targets), fresh.draw(targets))
    np.testing.assert_array_equal(tree.get(np.arange(capacity)), leaves)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(1e-300, 1e300))
def test_draw_at_the_edges_never_returns_zero_leaf(seed: int, scale: float) -> None:
    """Targets on and beyond every border of a sparse tree land on leaves above 0."""
    rng = np.random.default_rng(seed)
    leaves = np.where(rng.random(20_000) < 0.01, rng.random(20_000), 0.0) * scale
    leaves[rng.integers(20_000)] = scale
    tree = SumTree(len(leaves))
    tree.rebuild(leaves)
    ends = leaves.cumsum()
    edges = np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), [0.0, tree.total]])
    assert (tree.get(tree.draw(edges)) > 0).all()


def test_set_duplicate_indices_last_wins() -> None:
    """Of two values for one leaf in one call the last one stays, in the leaf and in the sums."""
    tree = SumTree(5000)
    tree.set(np.array([4000, 3, 4000]), np.array([1.0, 2.0, 5.0]))
    assert tree.get(np.array([4000])).tolist() == [5.0]
    assert tree.total == 7.0


def test_draw_empty_tree_raises() -> None:
    """A tree of zeros refuses to draw instead of inventing a leaf."""
    with pytest.raises(ValueError, match="nothing to draw"):
        SumTree(10).draw(np.array([0.0]))


def test_draw_many_times_follows_values() -> None:
    """The frequencies of a hundred thousand draws pass a chi-square test against the values."""
    rng = np.random.default_rng(0)
    leaves = rng.random(2000)
    leaves[::3] = 0.0
    tree = SumTree(2000)
    tree.rebuild(leaves)
    counts = np.bincount(tree.draw(rng.random(100_000) * tree.total), minlength=2000)
    live = leaves > 0
    expected = leaves[live] / tree.total * 100_000
    statistic = ((counts[live] - expected) ** 2 / expected).sum()
    freedom = live.sum() - 1
    assert counts[~live].sum() == 0
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
