"""The buffer: batches against brute force, priorities, tokens, and what it refuses."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_episodes import AGENT, Episode, Sender, assert_row, fill, make_buffer, make_spec

from services.replay.buffer import AgentBuffer, _draw_key
from services.replay.kernels import stratified_targets
from shared.codec import pack_segment
from shared.errors import Refused, SpecMismatch, StaleToken
from shared.segment_frame import frame_of, read_frame
from shared.specs import DType

SPEC = make_spec()
ENDS = st.sampled_from(["terminated", "truncated", ""])


@pytest.fixture
def filled(tmp_path: Path) -> AgentBuffer:
    buffer = make_buffer(tmp_path, SPEC)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 1000 * n, 10, "terminated") for n in range(5)])
    return buffer


def leaves(buffer: AgentBuffer) -> np.ndarray:
    return buffer._tree.get(np.arange(buffer.capacity_steps))


@settings(max_examples=60, deadline=None)
@given(
    stack=st.integers(1, 5),
    n_step=st.integers(1, 4),
    segment_steps=st.integers(1, 9),
    episodes=st.lists(st.tuples(st.integers(1, 20), ENDS), min_size=1, max_size=8),
    shape=st.sampled_from([(), (3,), (2, 2)]),
)
def test_draw_random_episodes_matches_brute_force(
    stack: int, n_step: int, segment_steps: int, episodes: list[tuple[int, str]], shape: tuple[int, ...]
) -> None:
    """Every row equals the one put together from its whole episode, around the ring's seam too."""
    spec = make_spec(stack, shape)
    played = [Episode(spec, 1000 * n, length, end) for n, (length, end) in enumerate(episodes)]
    with tempfile.TemporaryDirectory() as directory:
        buffer = make_buffer(
            Path(directory), spec, capacity_steps=40, n_step=n_step, segment_steps=segment_steps, alpha=0.0
        )
        fill(buffer, Sender(spec), played)
        batch = buffer.draw(0, 4 * buffer.capacity_steps, 0.5)
    for i, version in enumerate(batch["version"].tolist()):
        assert_row(batch, i, played[version // 1000].expected(version % 1000, n_step))


def test_draw_uniform_large_enough_reaches_every_step(filled: AgentBuffer) -> None:
    """With equal priorities, four draws per step reach each drawable step, and no other leaf."""
    batch = filled.draw(0, 4 * filled.drawable_steps, 0.4)
    assert len(set(batch["version"].tolist())) == filled.drawable_steps == 50


def test_draw_arrays_have_declared_types_and_shapes(filled: AgentBuffer) -> None:
    """The arrays of a batch are what the protocol says, contiguous and the caller's own."""
    batch = filled.draw(0, 8, 0.4)
    described = {name: (array.dtype.name, array.shape) for name, array in batch.items()}
    assert described == {
        "observation": ("int32", (8, 2, 2)),
        "next_observation": ("int32", (8, 2, 2)),
        "action": ("int64", (8,)),
        "control": ("float32", (8, 2)),
        "return": ("float32", (8,)),
        "discount": ("float32", (8,)),
        "weight": ("float32", (8,)),
        "index": ("int64", (8,)),
        "generation": ("uint64", (8,)),
        "version": ("int64", (8,)),
    }
    assert all(array.flags.c_contiguous and array.flags.writeable for array in batch.values())
    kept = {name: array.copy() for name, array in batch.items()}
    filled.draw(1, 8, 0.4)
    for name, array in batch.items():
        np.testing.assert_array_equal(array, kept[name])


def test_draw_same_number_is_same_batch(filled: AgentBuffer) -> None:
    """A draw depends on seed, agent and number only: repeated it is the same, another number is not."""
    first, again, other = filled.draw(3, 32, 0.4), filled.draw(3, 32, 0.4), filled.draw(4, 32, 0.4)
    np.testing.assert_array_equal(first["index"], again["index"])
    assert (first["index"] != other["index"]).any()
    assert filled.sampled_steps == 96
    filled.draw(4, 32, 0.4, count=False)
    assert filled.sampled_steps == 96


def test_draw_other_seed_or_agent_is_other_batch(tmp_path: Path) -> None:
    """Two seeds, and two agents of one seed, draw differently."""
    drawn = []
    for name, seed in (("a", 7), ("b", 8)):
        buffer = make_buffer(tmp_path / name, SPEC, seed=seed)
        fill(buffer, Sender(SPEC), [Episode(SPEC, 0, 50)])
        drawn.append(buffer.draw(0, 8, 0.4)["index"].tolist())
    assert drawn[0] != drawn[1]
    assert (_draw_key(7, AGENT) != _draw_key(7, "agent_1")).any()


def test_draw_in_one_call_is_bit_for_bit_that_in_steps(filled: AgentBuffer) -> None:
    """Targets, tree and rows one after another give the same block, so runs of before can be repeated."""
    first = filled.draw(0, 64, 0.0)
    filled.update_priorities(first["index"], first["generation"], np.linspace(0, 9, 64, dtype=np.float32))
    for number, size in enumerate((1, 2, 7, 64, 500)):
        batch = filled.draw(number, size, 0.7)
        targets, found, values = np.empty(size), np.empty(size, np.int64), np.empty(size, np.float32)
        stratified_targets(filled._key, number, filled._tree.total, targets)
        smallest = filled._tree.draw(targets, found, values)
        rows = filled.rows(found)
        values /= np.float32(smallest)
        rows["weight"][:] = np.power(values, -0.7)
        assert batch.block.tobytes() == rows.block.tobytes()


SCRIBBLE = """
import sys, threading, time
from pathlib import Path
import numpy as np
sys.path[:0] = sys.argv[2:]
from replay_episodes import Episode, Sender, fill, make_buffer, make_spec

buffer = make_buffer(Path(sys.argv[1]), make_spec())
fill(buffer, Sender(buffer.spec), [Episode(buffer.spec, 1000 * n, 10, "terminated") for n in range(5)])
layout = buffer.draw(0, 8192, 0.5).layout
tray = np.zeros(layout.nbytes, np.uint8)
place = layout.places["index"].offset
words = tray[place : place + 8192 * 8].view(np.int64)
until = time.monotonic() + 1.0


def scribble():
    while time.monotonic() < until:
        for _ in range(100):
            words[:] = 1 << 50


threading.Thread(target=scribble).start()
number = 0
while time.monotonic() < until:
    batch = buffer.draw(number, 8192, 0.5, tray=tray)
    assert batch.block is tray
    number += 1
print(number)
"""


def test_draw_onto_memory_that_its_owner_writes_to_reads_only_rows_of_the_buffer(tmp_path: Path) -> None:
    """A learner that spoils the tray it lent spoils its own batch, not the service."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIBBLE, str(tmp_path), str(Path(__file__).parent), str(Path.cwd())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 10


def test_weights_any_beta_follow_the_formula(filled: AgentBuffer) -> None:
    """Weights are (N P)^-beta over their maximum."""
    first = filled.draw(0, 64, 0.0)
    filled.update_priorities(first["index"], first["generation"], np.linspace(0, 9, 64, dtype=np.float32))
    assert (first["weight"] == 1.0).all()
    batch = filled.draw(1, 64, 0.7)
    values = leaves(filled)
    wanted = (filled.drawable_steps * values[batch["index"]] / values.sum()) ** -0.7
    np.testing.assert_allclose(batch["weight"], wanted / wanted.max(), rtol=1e-5)


def test_draw_many_batches_follows_priorities(filled: AgentBuffer) -> None:
    """Frequencies over many draws pass a chi-square test against (|td| + epsilon)^alpha."""
    first = filled.draw(0, 500, 0.0)
    td = (first["index"] % 7 + 0.1).astype(np.float32)
    assert filled.update_priorities(first["index"], first["generation"], td) == 0
    counts = np.zeros(filled.capacity_steps)
    for n in range(2000):
        np.add.at(counts, filled.draw(n, 8, 0.4)["index"], 1)
    values = leaves(filled)
    live = values > 0
    expected = values[live] / values.sum() * 16_000
    assert counts[~live].sum() == 0
    # Stratified draws scatter less than independent ones, so only the upper side can fail.
    assert ((counts[live] - expected) ** 2 / expected).sum() < live.sum() + 5 * np.sqrt(2 * live.sum())


@pytest.fixture
def uneven(tmp_path: Path) -> tuple[AgentBuffer, np.ndarray]:
    """A buffer whose priorities span six decades in no order, and each leaf's exact probability."""
    buffer = make_buffer(tmp_path, SPEC, capacity_steps=256)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 1000 * n, 13, "terminated") for n in range(14)])
    rows = buffer.rows(np.flatnonzero(leaves(buffer)))
    td = np.random.default_rng(3).permutation(np.geomspace(1e-3, 1e3, len(rows["index"])).astype(np.float32))
    assert buffer.update_priorities(rows["index"], rows["generation"], td) == 0
    probabilities = np.zeros(buffer.capacity_steps)
    probabilities[rows["index"]] = (td.astype(np.float64) + 1e-3) ** 0.6
    return buffer, probabilities / probabilities.sum()


def test_draw_million_rows_of_uneven_priorities_follows_exact_probabilities(
    uneven: tuple[AgentBuffer, np.ndarray],
) -> None:
    """A million rows pass a chi-square test, and no leaf is further off than strata allow."""
    buffer, probabilities = uneven
    batches, size = 245, 4096
    counts = np.zeros(buffer.capacity_steps)
    for n in range(batches):
        counts += np.bincount(buffer.draw(n, size, 0.4)["index"], minlength=buffer.capacity_steps)
    live = probabilities > 0
    expected = batches * size * probabilities
    assert counts.sum() == batches * size > 10**6
    assert counts[~live].sum() == 0
    assert live.sum() == buffer.drawable_steps == 182
    assert expected[live].min() > 10
    # Stratified draws scatter less than independent ones, so only the upper side can fail.
    squares = (counts[live] - expected[live]) ** 2 / expected[live]
    assert squares.sum() < live.sum() + 5 * np.sqrt(2 * live.sum())
    # Within a batch only the two strata at a leaf's edges are left to chance, each with a variance of 1/4.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(batches / 2)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.4, 0.75, 1.0])
def test_weights_of_every_batch_equal_the_formula_to_float32(
    uneven: tuple[AgentBuffer, np.ndarray], beta: float
) -> None:
    """Weights are (N P)^-beta over the batch's maximum, whatever the batch holds."""
    buffer, probabilities = uneven
    for n in range(60):
        batch = buffer.draw(n, (1, 7, 256, 4096)[n % 4], beta)
        wanted = (buffer.drawable_steps * probabilities[batch["index"]]) ** -beta
        np.testing.assert_allclose(batch["weight"], wanted / wanted.max(), rtol=1e-6)
        assert batch["weight"].max() == 1.0
        assert beta or (batch["weight"] == 1.0).all()


@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FLOAT16, DType.FLOAT32, DType.INT64, DType.BOOL])
def test_observations_of_any_type_come_back_bit_for_bit(
    tmp_path: Path, dtype: DType, shape: tuple[int, ...]
) -> None:
    """Stacks in batches have the bits that were sent, also those of NaN, and after reopening too."""
    spec = make_spec(3, shape, dtype)
    ends = [(1, "terminated"), (9, ""), (4, "truncated"), (10, "terminated"), (2, ""), (7, "truncated")]
    played = [Episode(spec, 1000 * n, length, end) for n, (length, end) in enumerate(ends)]
    fill(make_buffer(tmp_path, spec, n_step=2, alpha=0.0), Sender(spec), played[:3])
    buffer = make_buffer(tmp_path, spec, n_step=2, alpha=0.0)
    fill(buffer, Sender(spec, number=2), played[3:])
    batch = buffer.draw(0, 4 * buffer.drawable_steps, 0.5)
    assert len(set(batch["version"].tolist())) == buffer.drawable_steps == 33
    for i, version in enumerate(batch["version"].tolist()):
        expected = played[version // 1000].expected(version % 1000, 2)
        assert_row(batch, i, expected)
        for name in ("observation", "next_observation"):
            assert batch[name].dtype == expected[name].dtype == dtype.numpy
            assert batch[name][i].tobytes() == expected[name].tobytes()


def test_alpha_zero_is_exactly_uniform(tmp_path: Path) -> None:
    """With alpha 0 every drawable leaf is 1 and every weight is 1, whatever the priorities."""
    buffer = make_buffer(tmp_path, SPEC, alpha=0.0)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 0, 9)])
    batch = buffer.draw(0, 16, 1.0)
    buffer.update_priorities(batch["index"], batch["generation"], np.arange(16, dtype=np.float32) * 1e6)
    assert sorted(set(leaves(buffer).tolist())) == [0.0, 1.0]
    assert leaves(buffer).sum() == 9
    assert (buffer.draw(1, 16, 1.0)["weight"] == 1.0).all()


def test_draw_from_empty_buffer_is_refused(tmp_path: Path) -> None:
    """Nothing to draw is an answer, not a crash."""
    with pytest.raises(Refused, match="no steps to draw"):
        make_buffer(tmp_path, SPEC).draw(0, 8, 0.4)


def test_draw_past_stale_rows_of_older_segment_ignores_them(tmp_path: Path) -> None:
    """Rewards of an overwritten, longer segment never leak into returns, however large they are."""
    buffer, sender = make_buffer(tmp_path, SPEC, capacity_steps=4), Sender(SPEC)
    long = Episode(SPEC, 0, 12)
    long.arrays["reward"][:] = 1e30
    fill(buffer, sender, [long])
    short = Episode(SPEC, 1000, 2, "truncated")
    fill(buffer, sender, [short])
    batch = buffer.draw(0, 8, 0.4)
    for i, version in enumerate(batch["version"].tolist()):
        assert_row(batch, i, short.expected(version - 1000, 3))


def test_new_steps_get_largest_priority_also_after_reopening(tmp_path: Path) -> None:
    """The largest |td| so far is kept in the files and given to new steps."""
    buffer, sender = make_buffer(tmp_path, SPEC), Sender(SPEC)
    fill(buffer, sender, [Episode(SPEC, 0, 4)])
    assert buffer.max_priority == 1.0
    batch = buffer.draw(0, 1, 0.4)
    buffer.update_priorities(batch["index"], batch["generation"], np.array([6.5], np.float32))
    again = make_buffer(tmp_path, SPEC)
    assert again.max_priority == 6.5
    fill(again, sender, [Episode(SPEC, 1000, 4)])
    np.testing.assert_allclose(leaves(again)[4:8], (6.5 + 1e-3) ** 0.6)


def test_reopened_buffer_draws_the_same_batches(filled: AgentBuffer, tmp_path: Path) -> None:
    """The tree rebuilt from the files is bit for bit the one that was lost."""
    batch = filled.draw(0, 32, 0.4)
    filled.update_priorities(
        batch["index"], batch["generation"], np.geomspace(1e-6, 1e6, 32, dtype=np.float32)
    )
    again = make_buffer(tmp_path, SPEC)
    np.testing.assert_array_equal(leaves(again), leaves(filled))
    assert again.stats() == filled.stats()
    kept = again.draw(5, 64, 0.4)
    for name, array in filled.draw(5, 64, 0.4).items():
        np.testing.assert_array_equal(array, kept[name])


def test_priorities_of_other_generation_become_initial(filled: AgentBuffer, tmp_path: Path) -> None:
    """After a power cut, priorities of another generation or that are no numbers count as never updated."""
    batch = filled.draw(0, 64, 0.4)
    filled.update_priorities(batch["index"], batch["generation"], np.full(64, 3.0, np.float32))
    filled._ring.priority_generation[0] += 1
    filled._ring.priorities[1, 0] = np.nan
    again = make_buffer(tmp_path, SPEC)
    np.testing.assert_allclose(leaves(again)[:5], (3.0 + 1e-3) ** 0.6)
    assert again.drawable_steps == filled.drawable_steps


def test_update_stale_or_senseless_entries_are_counted(filled: AgentBuffer) -> None:
    """Overwritten, out-of-range, undrawable and non-finite entries change nothing and are counted."""
    before = leaves(filled)
    good = filled.draw(0, 1, 0.4)
    i, g = int(good["index"][0]), int(good["generation"][0])
    short_slot = int(np.flatnonzero(filled._ring.metadata["owned"] == 2)[0])
    undrawable, its_generation = 4 * short_slot + 3, int(filled._ring.commit[short_slot])
    entries: list[tuple[int, int, float]] = [
        (i, g + 1, 1.0),
        (i, 0, 1.0),
        (-1, g, 1.0),
        (-(2**63), g, 1.0),
        (2**63 - 1, 2**64 - 1, 1.0),
        (filled.capacity_steps, g, 1.0),
        (filled.capacity_steps - 1, 0, 1.0),
        (undrawable, its_generation, 1.0),
        (i, g, np.nan),
        (i, g, np.inf),
        (i, g, -1.0),
        (i, g, 1e300),
    ]
    index, generation, priority = (list(column) for column in zip(*entries, strict=True))
    stale = filled.update_priorities(
        np.array(index, np.int64), np.array(generation, np.uint64), np.array(priority, np.float64)
    )
    assert stale == len(entries) == filled.stats()["stale_priorities"]
    np.testing.assert_array_equal(leaves(filled), before)
    assert filled.max_priority == 1.0


def test_update_generation_zero_never_wakes_an_invalid_slot(filled: AgentBuffer, tmp_path: Path) -> None:
    """A dropped slot still has its metadata; an update that names the invalid generation stays ignored."""
    filled._ring.metadata["checksum"][2] += 1
    again = make_buffer(tmp_path, SPEC)
    index, generation = np.array([8], np.int64), np.zeros(1, np.uint64)
    assert again.update_priorities(index, generation, np.ones(1, np.float32)) == 1
    assert (leaves(again)[8:12] == 0).all()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_update_hostile_arrays_never_break_the_tree(data: st.DataObject) -> None:
    """Arrays of the right types and any content leave a tree that equals the one rebuilt from the files."""
    n = data.draw(st.integers(0, 20))
    index = data.draw(
        st.lists(st.one_of(st.integers(-70, 70), st.integers(-(2**63), 2**63 - 1)), min_size=n, max_size=n)
    )
    real = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    priority = data.draw(st.lists(st.floats(width=32), min_size=n, max_size=n))
    with tempfile.TemporaryDirectory() as directory:
        buffer = make_buffer(Path(directory), SPEC)
        fill(buffer, Sender(SPEC), [Episode(SPEC, 0, 30)])
        commits = buffer._ring.commit[np.clip(np.array(index, np.int64) // 4, 0, 15)]
        generation = np.where(real, commits, 12345).astype(np.uint64)
        buffer.update_priorities(np.array(index, np.int64), generation, np.array(priority, np.float32))
        again = make_buffer(Path(directory), SPEC)
    np.testing.assert_array_equal(leaves(buffer), leaves(again))
    assert (leaves(buffer) > 0).sum() == buffer.drawable_steps == 30


def test_update_same_row_twice_last_wins_in_file_and_tree(filled: AgentBuffer, tmp_path: Path) -> None:
    """Of two priorities for one row in one update the last one is kept, and after reopening too."""
    batch = filled.draw(0, 1, 0.4)
    index, generation = batch["index"].repeat(3), batch["generation"].repeat(3)
    filled.update_priorities(index, generation, np.array([5.0, 9.0, 2.0], np.float32))
    for buffer in (filled, make_buffer(tmp_path, SPEC)):
        np.testing.assert_allclose(leaves(buffer)[index[0]], (2.0 + 1e-3) ** 0.6)
        assert buffer.max_priority == 9.0


@pytest.mark.parametrize(
    "arrays",
    [
        (np.zeros(2, np.int64), np.zeros(3, np.uint64), np.zeros(2, np.float32)),
        (np.zeros((2, 1), np.int64), np.zeros(2, np.uint64), np.zeros(2, np.float32)),
        (np.zeros(2, np.float32), np.zeros(2, np.uint64), np.zeros(2, np.float32)),
        (np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.float32)),
        (np.zeros((), np.int64), np.zeros((), np.uint64), np.zeros((), np.float32)),
    ],
)
def test_update_wrong_types_or_shapes_is_refused(filled: AgentBuffer, arrays: tuple[Any, ...]) -> None:
    """Arrays that cannot be an update are a mismatch by name."""
    with pytest.raises(SpecMismatch, match="priority update"):
        filled.update_priorities(*arrays)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent": "somebody"}, "somebody"),
        ({"before": 2}, "2 rows before"),
        ({"owned": 5}, "5 owned steps"),
        ({"owned": 1}, "4 rows after"),
        ({"owned": 4, "rows": 4}, "0 rows after"),
        ({"rows": 6}, "was expected"),
        ({"checksum": 1}, "checksum"),
    ],
)
def test_insert_wrong_header_is_refused_before_any_write(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Headers that do not fit the slot, the arrays or the checksum change nothing."""
    buffer, sender = make_buffer(tmp_path, SPEC), Sender(SPEC)
    (lengths, arrays), *_ = Episode(SPEC, 0, 4).cut(4, 3)
    with pytest.raises(SpecMismatch, match=words):
        buffer.insert(sender.segment(1, lengths, arrays, **changes), arrays)
    assert (buffer.mark(sender.incarnation), buffer.drawable_steps, buffer._ring.generation % 2**32) == (
        0,
        0,
        0,
    )


def test_insert_wrong_arrays_is_refused(tmp_path: Path) -> None:
    """Missing arrays, other types, and an episode that ends in the middle are refused."""
    buffer, sender = make_buffer(tmp_path, SPEC), Sender(SPEC)
    (lengths, arrays), *_ = Episode(SPEC, 0, 4).cut(4, 3)
    segment = sender.segment(1, lengths, arrays)
    with pytest.raises(SpecMismatch, match="were expected"):
        buffer.insert(segment, {name: array for name, array in arrays.items() if name != "turn"})
    with pytest.raises(SpecMismatch, match="reward"):
        buffer.insert(segment, arrays | {"reward": arrays["reward"].astype(np.float64)})
    arrays["truncated"][1] = True
    with pytest.raises(SpecMismatch, match="after the end of its episode"):
        buffer.insert(sender.segment(1, lengths, arrays), arrays)


def test_insert_of_what_came_in_a_frame_is_held_to_its_length_and_its_digest(tmp_path: Path) -> None:
    """Arrays from the wire are bytes: they must be as many as the spec needs, and made for this spec."""
    buffer, sender = make_buffer(tmp_path, SPEC), Sender(SPEC)
    (lengths, arrays), *_ = Episode(SPEC, 0, 4).cut(4, 3)
    head, block = read_frame(frame_of(sender.next(lengths, arrays), pack_segment(SPEC, arrays)).data)
    with pytest.raises(SpecMismatch, match=f"arrays of {len(block) - 1} bytes"):
        buffer.insert(head, block[:-1])
    with pytest.raises(SpecMismatch, match=f"arrays of {len(block) + 64} bytes"):
        buffer.insert(head, np.concatenate([block, np.zeros(64, np.uint8)]))
    with pytest.raises(SpecMismatch, match="its arrays are others"):
        buffer.insert(head._replace(layout=head.layout ^ 1), block)
    with pytest.raises(SpecMismatch, match="rows after"):
        buffer.insert(head._replace(rows=60_000), block)
    assert buffer.drawable_steps == 0
    assert buffer.insert(head, block) == "stored"
    for name, kept in buffer.ring.slot_arrays(0).items():
        np.testing.assert_array_equal(kept, arrays[name])


def test_insert_duplicates_and_gaps_are_dropped_and_counted(tmp_path: Path) -> None:
    """Only the next number is stored; the others are counted in steps, and the ledger stays whole."""
    buffer, sender = make_buffer(tmp_path, SPEC), Sender(SPEC)
    pieces = Episode(SPEC, 0, 12).cut(4, 3)
    segments = [sender.next(*piece) for piece in pieces]
    verdicts = [buffer.insert(segments[n], pieces[n][1], now=0.0) for n in (0, 2, 0, 1, 1, 2)]
    assert verdicts == ["stored", "gap", "duplicate", "stored", "duplicate", "stored"]
    assert buffer.counters() == {"duplicates_dropped": 8, "gaps_dropped": 4, "damaged_slots": 0}
    buffer.report(sender.incarnation, 15, final=False, now=0.0)
    assert buffer.ledger(now=0.0, lease_s=5.0) == {
        "produced": 15,
        "stored": 12,
        "in_flight": 3,
        "abandoned": 0,
        "lost": 0,
        "duplicates_dropped": 8,
        "stored_twice": 0,
    }


def test_token_lower_than_granted_is_stale_also_after_reopening(tmp_path: Path) -> None:
    """The highest number that was granted is kept in the files; lower ones are refused, others pass."""
    buffer = make_buffer(tmp_path, SPEC)
    buffer.note_token(3)
    buffer.check_token(3)
    buffer.check_token(9)
    again = make_buffer(tmp_path, SPEC)
    with pytest.raises(StaleToken, match="token 2"):
        again.check_token(2)
    again.note_token(5)
    again.note_token(4)
    with pytest.raises(StaleToken, match="token 4"):
        again.check_token(4)


def test_limiter_over_reopening_keeps_its_balance(tmp_path: Path) -> None:
    """Counts and forgiven samples survive; another ratio in the config starts the balance anew."""
    buffer = make_buffer(tmp_path, SPEC, tolerance_samples=10.0)
    assert buffer.limiter.reason() == "4 more steps wanted before batches flow"
    fill(buffer, Sender(SPEC), [Episode(SPEC, 0, 12)])
    buffer.draw(0, 8, 0.4)
    assert buffer.limiter.ahead == 8 * 8.0 - 8
    buffer.forgive()
    assert make_buffer(tmp_path, SPEC, tolerance_samples=10.0).limiter.ahead == buffer.limiter.ahead == 10.0
    assert make_buffer(tmp_path, SPEC, samples_per_insert=2.0).limiter.ahead == 0.0
    buffer.adjust_limiter(samples_per_insert=3.0)
    assert make_buffer(tmp_path, SPEC, samples_per_insert=3.0).limiter.ahead == 0.0


def test_limiter_set_while_running_and_then_in_the_config_keeps_its_balance(tmp_path: Path) -> None:
    """A config that catches up with what was set by hand says nothing new, so nothing starts anew."""
    buffer, sender = make_buffer(tmp_path, SPEC), Sender(SPEC)
    fill(buffer, sender, [Episode(SPEC, 0, 12)])
    buffer.adjust_limiter(samples_per_insert=3.0, min_steps=5)
    fill(buffer, sender, [Episode(SPEC, 1000, 4)])
    assert buffer.limiter.ahead == 12.0
    for min_steps, ahead in ((5, 12.0), (5, 12.0), (4, 0.0)):
        again = make_buffer(tmp_path, SPEC, samples_per_insert=3.0, min_steps=min_steps)
        assert (again.limiter.ahead, again.limiter.min_steps) == (ahead, min_steps)


def test_full_ring_of_short_segments_can_be_sampled(tmp_path: Path) -> None:
    """One-step episodes fill the slots without ever reaching min_steps; batches flow all the same."""
    buffer = make_buffer(tmp_path, SPEC, capacity_steps=16, min_steps=16)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 10 * n, 1, "terminated") for n in range(40)])
    assert buffer.drawable_steps == 4
    assert buffer.limiter.can_sample(1)
    assert make_buffer(tmp_path, SPEC, capacity_steps=16, min_steps=16).limiter.can_sample(1)


def test_sync_from_elsewhere_touches_every_file(filled: AgentBuffer) -> None:
    """Syncing works by path alone, so that a thread can do it."""
    filled.sync()


@pytest.mark.parametrize("action", [-1, 4, 2**62])
def test_segment_with_an_action_that_does_not_exist_is_refused(tmp_path: Path, action: int) -> None:
    """It would end every learner that draws it, again and again."""
    buffer, episode = make_buffer(tmp_path, SPEC), Episode(SPEC, 0, 3)
    episode.arrays["action"][1] = action
    with pytest.raises(SpecMismatch, match="action"):
        fill(buffer, Sender(SPEC), [episode])
    assert buffer.drawable_steps == 0


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_segment_with_a_reward_that_is_not_finite_is_refused(tmp_path: Path, reward: float) -> None:
    """No priority would ever come back for it, so it would be drawn for ever."""
    buffer, episode = make_buffer(tmp_path, SPEC), Episode(SPEC, 0, 3)
    episode.arrays["reward"][1] = reward
    with pytest.raises(SpecMismatch, match="reward"):
        fill(buffer, Sender(SPEC), [episode])
    assert buffer.drawable_steps == 0


def test_state_with_nonsense_is_replaced_by_what_a_new_buffer_has(tmp_path: Path) -> None:
    """A power cut may leave anything in the small state file; the buffer still opens and draws."""
    buffer = make_buffer(tmp_path, SPEC)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 0, 4)])
    buffer._state["max_priority"] = np.nan
    buffer._state["limiter_offset"] = np.nan
    again = make_buffer(tmp_path, SPEC)
    assert again.max_priority == 1.0
    assert np.isfinite(again.limiter.ahead)
    assert len(again.draw(0, 4, 0.4)["index"]) == 4


class DeathError(Exception):
    """Stands for the end of the process."""


class DyingState:
    """Passes on so many stores, then dies."""

    def __init__(self, state: Any, stores: int) -> None:
        self._state, self._stores = state, stores

    def __getitem__(self, name: str) -> Any:
        return self._state[name]

    def __setitem__(self, name: str, value: float) -> None:
        if not self._stores:
            raise DeathError
        self._stores -= 1
        self._state[name] = value


@pytest.mark.parametrize("stores", range(4))
def test_death_while_the_limiter_is_set_leaves_a_balance_of_its_ratio(tmp_path: Path, stores: int) -> None:
    """Whichever store was the last, nobody is thousands of samples ahead when the files are opened again."""
    buffer = make_buffer(tmp_path, SPEC, tolerance_samples=10.0)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 100 * n, 60) for n in range(10)])
    for n in range(596):
        buffer.draw(n, 8, 0.4)
    assert buffer.limiter.ahead == 0
    buffer._state = DyingState(buffer._state, stores)  # type: ignore[assignment]
    with pytest.raises(DeathError):
        buffer.adjust_limiter(samples_per_insert=16.0)
    again = make_buffer(tmp_path, SPEC, tolerance_samples=10.0)
    assert again.limiter.samples_per_insert == (16.0 if stores > 1 else 8.0)
    assert again.limiter.ahead == 0


def test_ring_whose_last_slot_was_filled_is_full_at_once(tmp_path: Path) -> None:
    """A ring of short segments is full with its last free slot, not only when something had to go."""
    settings = {"capacity_steps": 16, "min_steps": 16, "segment_steps": 4}
    buffer = make_buffer(tmp_path, SPEC, **settings)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 100 * n, 1) for n in range(4)])
    assert buffer.limiter.full
    assert buffer.limiter.can_sample(1)
    assert make_buffer(tmp_path, SPEC, **settings).limiter.full


def test_draw_larger_than_a_message_can_be_is_refused_in_words(tmp_path: Path) -> None:
    """A batch that could never arrive is an answer that says what to change; smaller ones go on."""
    buffer = make_buffer(tmp_path, SPEC, max_batch_bytes=10_000)
    fill(buffer, Sender(SPEC), [Episode(SPEC, 0, 20)])
    with pytest.raises(Refused, match=r"65,536 rows needs .* 10,000 can be sent; lower learner.batch_size"):
        buffer.draw(0, 65_536, 0.4)
    assert buffer.sampled_steps == 0
    assert len(buffer.draw(0, 8, 0.4)["index"]) == 8
