"""The mark table: what is next, what survives, and what the ledger says."""

from pathlib import Path

import numpy as np

from services.replay.records import METADATA, incarnation_words
from services.replay.streams import StreamLedger, Streams

A, B = f"{1:032x}", f"{2**127 + 5:032x}"


def slot(incarnation: str, sequence: int, stored: int, produced: int) -> np.ndarray:
    record = np.zeros(1, METADATA)
    record["incarnation"] = incarnation_words(incarnation)
    record["sequence"], record["stored_after"], record["produced_after"] = sequence, stored, produced
    return record


def test_judge_each_number_only_next_is_taken(tmp_path: Path) -> None:
    """A stream begins at 1 and takes only the number after its mark."""
    streams = Streams(tmp_path / "streams", now=0.0)
    assert [streams.judge(A, n) for n in (1, 2)] == ["next", "gap"]
    streams.advance(A, 1, stored=5, produced=7, now=0.0)
    assert [streams.judge(A, n) for n in (1, 2, 3)] == ["duplicate", "next", "gap"]
    assert streams.judge(B, 1) == "next"
    assert (streams.mark(A), streams.mark(B)) == (1, 0)


def test_table_reopened_keeps_marks_and_grows(tmp_path: Path) -> None:
    """Hundreds of streams, one with an all-zero name, are there again after reopening without a sync."""
    streams = Streams(tmp_path / "streams", now=0.0)
    names = [f"{n:032x}" for n in range(300)]
    for n, name in enumerate(names):
        streams.advance(name, n + 1, stored=n, produced=n + 2, now=0.0)
    again = Streams(tmp_path / "streams", now=0.0)
    assert [again.mark(name) for name in names] == list(range(1, 301))
    assert again.stored_steps == streams.stored_steps == sum(range(300))
    assert again.ledger(0.0, 1.0) == streams.ledger(0.0, 1.0)
    again.sync()


def test_recover_slot_at_or_above_mark_wins(tmp_path: Path) -> None:
    """Slots repair rows that were not written, or torn, and leave rows alone that are ahead of them."""
    streams = Streams(tmp_path / "streams", now=0.0)
    streams.advance(A, 4, stored=999, produced=1000, now=0.0)
    streams.advance(B, 9, stored=90, produced=95, now=0.0)
    slots = np.concatenate([slot(A, 4, 40, 44), slot(A, 3, 30, 33), slot(B, 7, 70, 77)])
    streams.recover(slots, now=0.0)
    assert (streams.mark(A), streams.stored_steps_of(A)) == (4, 40)
    assert (streams.mark(B), streams.stored_steps_of(B)) == (9, 90)
    assert streams.stored_steps == 130


def test_row_without_used_flag_does_not_exist(tmp_path: Path) -> None:
    """A row whose last store never happened is taken for free space."""
    streams = Streams(tmp_path / "streams", now=0.0)
    streams.advance(A, 1, stored=5, produced=5, now=0.0)
    streams._table[1] = (incarnation_words(B), 6, 60, 60, 0)
    again = Streams(tmp_path / "streams", now=0.0)
    assert again.mark(B) == 0
    again.report(B, 3, final=False, now=0.0)
    assert Streams(tmp_path / "streams", now=0.0).judge(B, 1) == "next"


def test_ledger_live_dead_and_final_streams_each_in_its_place(tmp_path: Path) -> None:
    """What is missing is in flight of the living, abandoned of the dead and lost of those that ended."""
    streams = Streams(tmp_path / "streams", now=0.0)
    names = [f"{n:032x}" for n in range(3)]
    for name in names:
        streams.advance(name, 1, stored=10, produced=10, now=0.0)
    streams.report(names[0], 13, final=False, now=10.0)
    streams.report(names[1], 15, final=False, now=1.0)
    streams.report(names[2], 17, final=True, now=10.0)
    assert streams.ledger(now=11.0, lease_s=5.0) == StreamLedger(45, 30, in_flight=3, abandoned=5, lost=7)
    assert streams.live(now=11.0, lease_s=5.0) == [names[0]]
    closed = streams.ledger(now=11.0, lease_s=5.0, closing=True)
    assert closed == StreamLedger(45, 30, in_flight=0, abandoned=8, lost=7)


def test_ledger_stored_above_produced_shows_negative_loss(tmp_path: Path) -> None:
    """An actor that claims less than was stored cannot hide: the difference is in `lost`."""
    streams = Streams(tmp_path / "streams", now=0.0)
    streams.advance(A, 1, stored=10, produced=4, now=0.0)
    assert streams.ledger(0.0, 5.0) == StreamLedger(4, 10, in_flight=0, abandoned=0, lost=-6)


def test_live_after_restart_lasts_one_lease(tmp_path: Path) -> None:
    """After reopening, an unheard stream counts as living for one lease time, a final one never."""
    streams = Streams(tmp_path / "streams", now=0.0)
    streams.report(A, 1, final=False, now=0.0)
    streams.report(B, 1, final=True, now=0.0)
    again = Streams(tmp_path / "streams", now=100.0)
    assert again.live(104.0, lease_s=5.0) == [A]
    assert again.live(106.0, lease_s=5.0) == []


def test_report_lower_or_not_final_later_changes_nothing(tmp_path: Path) -> None:
    """Late reports neither take back produced steps nor revive a stream that ended."""
    streams = Streams(tmp_path / "streams", now=0.0)
    streams.report(A, 9, final=True, now=0.0)
    streams.report(A, 4, final=False, now=1.0)
    assert streams.ledger(1.0, 5.0) == StreamLedger(9, 0, in_flight=0, abandoned=0, lost=9)
