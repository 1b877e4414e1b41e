"""A buffer in rounds: whoever is faster, the same rows enter in the same order and the same are drawn."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_play import BATCH, SPEC, Learner, Offer, Player, as_bytes, beta_of, expected_batches, make_rounds

from services.replay.rounds import AT_REST, REMEMBERED_ROUNDS, RoundBuffer, read_rounds
from shared.errors import BadMessage, ConfigError, Refused, SpecMismatch

ROUNDS = 5


def offer_all(rounds: RoundBuffer, offers: list[Offer]) -> None:
    for segment, arrays in offers:
        assert rounds.offer(segment, arrays) == "held"


def play_in_order(rounds: RoundBuffer, players: list[Player], numbers: range) -> dict[int, dict[str, bytes]]:
    """Round by round, one actor after the other; every batch that was drawn."""
    learner = Learner(rounds)
    for number in numbers:
        for player in players:
            offer_all(rounds, player.round(number))
        assert rounds.advance()
        learner.train()
    return learner.drawn


def ring_bytes(rounds: RoundBuffer) -> dict[str, bytes]:
    """All that the ring says of its slots but for the generations, which count openings."""
    ring = rounds.buffer.ring
    described = ring.metadata[["incarnation", "sequence", "actor_index", "env_slot", "epoch", "owned"]]
    return {
        "metadata": described.tobytes(),
        "priorities": ring.priorities.tobytes(),
        **{
            f"{slot}/{name}": rows.tobytes()
            for slot in ring.valid_slots().tolist()
            for name, rows in ring.slot_arrays(slot).items()
        },
    }


# --- what depends on who is faster: nothing ---------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(prefetch=st.integers(1, 5), moves=st.lists(st.integers(0, 4), max_size=150))
def test_rounds_any_order_of_arrival_draw_the_same_batches(prefetch: int, moves: list[int]) -> None:
    """Actors ahead of one another, draws and answers at any moment: every batch is the schedule's."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        players = [Player(0), Player(1, (7, 2)), Player(2, (4,))]
        expected = list(expected_batches(directory / "plain", [*players], ROUNDS, prefetch))
        in_order = make_rounds(directory / "in_order", actors=3, prefetch=prefetch)
        play_in_order(in_order, [Player(0), Player(1, (7, 2)), Player(2, (4,))], range(ROUNDS))

        rounds = make_rounds(directory / "any", actors=3, prefetch=prefetch)
        learner = Learner(rounds)
        senders = [Player(0), Player(1, (7, 2)), Player(2, (4,))]
        queues = [[offer for number in range(ROUNDS) for offer in each.round(number)] for each in senders]
        for move in [*moves, *list(range(5)) * 200]:
            if move == 3:
                learner.draw()
            elif move == 4:
                learner.answer()
            elif queues[move] and queues[move][0][0].round <= rounds.rounds + 1:  # further is not granted
                assert rounds.offer(*queues[move].pop(0)) == "held"
            rounds.advance()
        assert not any(queues)
        assert len(expected) > 2 * prefetch
        assert [learner.drawn[number] for number in sorted(learner.drawn)] == expected
        assert ring_bytes(rounds) == ring_bytes(in_order)


def test_round_enters_only_when_every_actor_has_closed_it(tmp_path: Path) -> None:
    """Until the last segment of the last actor is there nothing is stored."""
    rounds = make_rounds(tmp_path)
    *most, last = Player(1).round(0)
    offer_all(rounds, [*most, *Player(0).round(0)])
    assert rounds.advance() == set()
    assert rounds.buffer.inserted_steps == rounds.rounds == 0
    assert rounds.reason() == "round 0 is not here yet from actor 1"
    offer_all(rounds, [last])
    assert rounds.advance() == {f"{1:032x}", f"{2:032x}"}
    assert (rounds.buffer.inserted_steps, rounds.rounds) == (16, 1)
    assert rounds.held(f"{1:032x}") == 0
    assert rounds.buffer.mark(f"{1:032x}") == 3


def test_round_enters_only_when_the_one_before_was_trained_on(tmp_path: Path) -> None:
    """With draws of round 0 unanswered, round 1 waits however complete it is."""
    rounds, players = make_rounds(tmp_path), [Player(0), Player(1)]
    for player in players:
        offer_all(rounds, [*player.round(0), *player.round(1)])
    assert rounds.advance()
    assert rounds.due_draws == 1
    learner = Learner(rounds)
    assert rounds.advance() == set()
    assert learner.draw()
    assert rounds.advance() == set()
    assert rounds.reason() == "round 0 is trained on: 0 of 1 draws"
    assert learner.answer()
    assert rounds.at_boundary
    assert rounds.advance()
    assert rounds.rounds == 2


def test_draw_waits_for_the_update_of_k_draws_before(tmp_path: Path) -> None:
    """With K = 2 two batches may be out; the third comes after the first one's priorities."""
    rounds = make_rounds(tmp_path, actors=1, samples_per_insert=3.0)
    offer_all(rounds, Player(0, (20,)).round(0))
    rounds.advance()
    learner = Learner(rounds)
    assert rounds.due_draws == 5
    assert learner.draw()
    assert learner.draw()
    assert not learner.draw()
    assert learner.answer()
    assert learner.draw()
    assert not learner.draw()


# --- what is not taken ------------------------------------------------------------------------------------


def test_offer_duplicates_and_gaps_are_named_and_harmless(tmp_path: Path) -> None:
    """A repeated segment and one that comes too early change nothing."""
    rounds = make_rounds(tmp_path, actors=1)
    first, second, third = Player(0).round(0)
    assert rounds.offer(*second) == "gap"
    assert rounds.offer(*first) == "held"
    assert rounds.offer(*first) == "duplicate"
    assert rounds.offer(*third) == "gap"
    offer_all(rounds, [second, third])
    rounds.advance()
    assert rounds.offer(*third) == "duplicate"  # also once it is stored
    assert rounds.buffer.inserted_steps == 8


def changed(offer: Offer, **changes: Any) -> Offer:
    return offer[0].model_copy(update=changes), offer[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_index": 2}, "actor 2 in a run of 2 actors"),
        ({"round": 3}, "round 3; 1 rounds are stored"),
        ({"round": 0}, "round 0; 1 rounds are stored"),
        ({"actor_index": 1}, "begun by another process"),
        ({"checksum": 1}, "checksum"),
        ({"rows": 3}, "segment 4"),
        ({"agent": "agent_1"}, "agent_1"),
    ],
    ids=["actor", "future", "past", "process", "checksum", "shape", "agent"],
)
def test_offer_of_what_cannot_be_is_refused_without_harm(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """The refusal says what is wrong, and the round is the same as without it."""
    rounds, players = make_rounds(tmp_path), [Player(0), Player(1)]
    play_in_order(rounds, players, range(1))
    first, *rest = players[0].round(1)
    begun, *others = players[1].round(1)
    offer_all(rounds, [begun])
    with pytest.raises(BadMessage, match=words):
        rounds.offer(*changed(first, **changes))
    offer_all(rounds, [first, *rest, *others])
    assert len(rounds.advance()) == 2
    assert rounds.buffer.inserted_steps == 32


def test_stream_that_mixes_actors_or_goes_back_in_rounds_is_refused(tmp_path: Path) -> None:
    """It would enter in another order than it was numbered, and what is behind would count as a duplicate."""
    rounds, players = make_rounds(tmp_path), [Player(0), Player(1)]
    play_in_order(rounds, players, range(1))
    ahead, behind = players[0].round(2), players[0].round(1)
    offer_all(rounds, ahead)
    with pytest.raises(
        BadMessage, match="round 1 of actor 0 in a stream that has reached round 2 of actor 0"
    ):
        rounds.offer(*behind[0])
    with pytest.raises(
        BadMessage, match="round 1 of actor 1 in a stream that has reached round 2 of actor 0"
    ):
        rounds.offer(*changed(behind[0], actor_index=1))
    assert rounds.held(players[0].sender.incarnation) == len(ahead)


def test_offer_of_a_closed_round_is_refused(tmp_path: Path) -> None:
    """Nothing is added to a round that its actor has ended."""
    rounds, player = make_rounds(tmp_path), Player(0)
    offer_all(rounds, player.round(0))
    with pytest.raises(BadMessage, match="closed already"):
        rounds.offer(*player.round(0)[0])


def test_offer_of_wrong_rows_is_refused(tmp_path: Path) -> None:
    """Rows that are not the spec's never wait for a round in which they could not be stored."""
    rounds = make_rounds(tmp_path, actors=1)
    segment, arrays = Player(0).round(0)[0]
    with pytest.raises(SpecMismatch):
        rounds.offer(segment, arrays | {"reward": arrays["reward"].astype(np.float64)})
    assert rounds.held(segment.incarnation) == 0


def test_draw_repeated_gives_the_same_bytes_and_counts_once(tmp_path: Path) -> None:
    """An answer that was lost is sent again, also after priorities moved."""
    rounds = make_rounds(tmp_path, actors=1, samples_per_insert=3.0)
    offer_all(rounds, Player(0, (20,)).round(0))
    rounds.advance()
    learner = Learner(rounds)
    assert learner.draw()
    assert learner.draw()
    assert learner.answer()
    sampled = rounds.buffer.sampled_steps
    assert rounds.can_draw(1)
    assert as_bytes(rounds.draw(1, BATCH, beta_of(1))) == learner.drawn[1]
    assert rounds.buffer.sampled_steps == sampled == 2 * BATCH


@pytest.mark.parametrize(("draw", "batch_size", "code"), [(2, BATCH, "out_of_order"), (0, 3, "bad_value")])
def test_draw_out_of_turn_or_size_is_refused(tmp_path: Path, draw: int, batch_size: int, code: str) -> None:
    """Only the next draw, of the size that the schedule counts with."""
    rounds = make_rounds(tmp_path, actors=1, samples_per_insert=3.0)
    offer_all(rounds, Player(0, (20,)).round(0))
    rounds.advance()
    assert not rounds.can_draw(2)
    with pytest.raises(Refused) as caught:
        rounds.draw(draw, batch_size, 0.4)
    assert caught.value.code == code
    assert Learner(rounds).draw()


def test_updates_out_of_order_are_refused_and_repeats_ignored(tmp_path: Path) -> None:
    """Priorities come in the order of the draws, and only for draws that were made."""
    rounds = make_rounds(tmp_path, actors=1, samples_per_insert=3.0)
    offer_all(rounds, Player(0, (20,)).round(0))
    rounds.advance()
    first, second = rounds.draw(0, BATCH, 0.4), rounds.draw(1, BATCH, 0.4)
    none = np.zeros(BATCH, np.float32)
    for draw, batch in ((1, second), (2, second)):
        with pytest.raises(Refused, match="the next ones are those of 0"):
            rounds.take_update(draw, batch["index"], batch["generation"], none)
    assert rounds.answered == 0
    for _ in range(2):
        rounds.take_update(0, first["index"], first["generation"], none)
    assert rounds.answered == 1


def test_skipped_update_counts_as_answered_and_changes_no_priority(tmp_path: Path) -> None:
    """A batch whose loss was not finite: no rows, but its turn is over."""
    rounds = make_rounds(tmp_path, actors=1, prefetch=1, samples_per_insert=3.0)
    offer_all(rounds, Player(0, (20,)).round(0))
    rounds.advance()
    before = rounds.buffer.ring.priorities.copy()
    batch = rounds.draw(0, BATCH, 0.4)
    rounds.take_update(0, batch["index"][:0], batch["generation"][:0], np.empty(0, np.float32))
    assert rounds.can_draw(1)
    rounds.draw(1, BATCH, 0.4)
    np.testing.assert_array_equal(rounds.buffer.ring.priorities, before)


# --- phases -----------------------------------------------------------------------------------------------


def test_due_after_says_the_draws_of_each_round(tmp_path: Path) -> None:
    """None before the round is stored, the same number however often and late it is asked for."""
    rounds, players = make_rounds(tmp_path), [Player(0), Player(1)]
    assert rounds.due_after(0) is None
    due = []
    for number in range(3):
        play_in_order(rounds, players, range(number, number + 1))
        due.append(rounds.due_after(number))
    assert due == [(16 * (number + 1) - 10) // BATCH for number in range(3)] == [1, 3, 6]
    assert [rounds.due_after(number) for number in range(4)] == [*due, None]


def test_due_after_of_a_round_long_gone_is_refused(tmp_path: Path) -> None:
    """A learner that is so far behind is not of this run."""
    rounds, players = make_rounds(tmp_path), [Player(0), Player(1)]
    play_in_order(rounds, players, range(REMEMBERED_ROUNDS + 1))
    with pytest.raises(Refused) as caught:
        rounds.due_after(0)
    assert caught.value.code == "out_of_order"
    assert rounds.due_after(1) is not None


def test_round_before_min_steps_has_no_draws_and_lets_the_next_in(tmp_path: Path) -> None:
    """While the buffer fills, phases are empty."""
    rounds, players = make_rounds(tmp_path, min_steps=40), [Player(0), Player(1)]
    assert not play_in_order(rounds, players, range(2))
    assert rounds.due_after(1) == 0
    assert rounds.at_boundary
    assert play_in_order(rounds, players, range(2, 3))


def test_interval_longer_than_a_round_draws_in_bursts(tmp_path: Path) -> None:
    """With 40 steps between bursts, rounds of 16 are drawn from every second or third time."""
    rounds, players = make_rounds(tmp_path, interval_steps=40), [Player(0), Player(1)]
    play_in_order(rounds, players, range(9))
    due = [rounds.due_after(number) or 0 for number in range(9)]
    assert due == [0, 0, 0, 6, 6, 13, 13, 13, 20]


# --- at rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("stop_after", [1, 4])
def test_saved_and_loaded_rounds_go_on_as_if_they_had_not_stopped(
    tmp_path: Path, prefetch: int, stop_after: int
) -> None:
    """Updates that wait for their turn, and the sum tree, come back bit for bit."""
    whole = play_in_order(
        make_rounds(tmp_path / "whole", prefetch=prefetch), [Player(0), Player(1)], range(8)
    )
    players = [Player(0), Player(1)]
    rounds = make_rounds(tmp_path / "parts", prefetch=prefetch)
    parts = play_in_order(rounds, players, range(stop_after))
    assert len(rounds._updates) == min(prefetch, rounds.due_draws)
    rounds.save(tmp_path / "parts")
    assert read_rounds(tmp_path / "parts") == (stop_after, rounds.due_draws)
    del rounds

    again = make_rounds(tmp_path / "parts", prefetch=prefetch)
    again.load(tmp_path / "parts")
    parts |= play_in_order(again, players, range(stop_after, 8))
    names = set(whole[0]) - {"generation"}  # counts openings
    assert len(whole) > 10
    assert {n: {name: b[name] for name in names} for n, b in parts.items()} == {
        n: {name: b[name] for name in names} for n, b in whole.items()
    }


def test_file_at_rest_stays_until_the_next_round_enters(tmp_path: Path) -> None:
    """Opened and closed again without a round, a buffer is still at rest."""
    players = [Player(0), Player(1)]
    rounds = make_rounds(tmp_path)
    play_in_order(rounds, players, range(2))
    rounds.save(tmp_path)
    for _ in range(2):  # it dies before anything was played
        rounds = make_rounds(tmp_path)
        rounds.load(tmp_path)
        assert (tmp_path / AT_REST).exists()
    offer_all(rounds, players[0].round(2))
    rounds.advance()
    assert (tmp_path / AT_REST).exists()
    offer_all(rounds, players[1].round(2))
    rounds.advance()
    assert not (tmp_path / AT_REST).exists()


def test_save_while_running_is_not_true_after_the_next_round(tmp_path: Path) -> None:
    """A copy is made of it meanwhile; what lies there afterwards must not be resumed."""
    rounds, players = make_rounds(tmp_path), [Player(0), Player(1)]
    play_in_order(rounds, players, range(2))
    rounds.save(tmp_path)
    play_in_order(rounds, players, range(2, 3))
    assert not (tmp_path / AT_REST).exists()


def test_load_of_a_used_buffer_without_its_file_is_refused(tmp_path: Path) -> None:
    """It was killed in the middle of a round, or was filled in another mode."""
    play_in_order(make_rounds(tmp_path), [Player(0), Player(1)], range(1))
    with pytest.raises(ConfigError, match="agent_0 was stopped in the middle of a round"):
        make_rounds(tmp_path).load(tmp_path)


def test_load_of_a_new_buffer_begins_at_round_0(tmp_path: Path) -> None:
    """Nothing there is nothing wrong."""
    rounds = make_rounds(tmp_path)
    rounds.load(tmp_path)
    assert (rounds.rounds, rounds.next_draw) == (0, 0)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 torn", b"plain words"])
def test_load_of_a_damaged_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    """Whatever the file is, it is not followed by a traceback."""
    rounds = make_rounds(tmp_path)
    play_in_order(rounds, [Player(0), Player(1)], range(1))
    (tmp_path / AT_REST).write_bytes(data)
    with pytest.raises(ConfigError, match="was not stopped between two rounds"):
        make_rounds(tmp_path).load(tmp_path)


def test_sum_tree_rebuilt_after_reopening_draws_the_same(tmp_path: Path) -> None:
    """The tree of a buffer that lived through a thousand updates, and the one made from its files."""
    rounds, players = make_rounds(tmp_path, samples_per_insert=8.0), [Player(0), Player(1)]
    play_in_order(rounds, players, range(12))
    kept = [as_bytes(rounds.buffer.draw(draw, 64, 0.7, count=False)) for draw in range(20)]
    reopened = make_rounds(tmp_path, samples_per_insert=8.0).buffer
    for draw in range(20):
        assert as_bytes(reopened.draw(draw, 64, 0.7, count=False)) == kept[draw]


def test_spec_of_these_tests_has_stacks_and_controls() -> None:
    """So that rows of every kind are compared."""
    assert SPEC.stack > 1
    assert SPEC.continuous is not None
