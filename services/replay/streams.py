"""Owns how far each stream of one agent is: what is stored, what its actor says it produced, if it lives.

A stream is one incarnation's segments for this agent, numbered from 1; only the next number is taken. The
marks are a memory-mapped table that grows; when it was last heard of a stream is kept in memory only. The
ledger counts owned steps: `produced` comes from the actors, `stored` from commits, neither from the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from services.replay.files import map_array, sync_file
from services.replay.records import Array, incarnation_text, incarnation_words

Judgement = Literal["next", "duplicate", "gap"]

ROW = np.dtype(
    [
        ("incarnation", "<u8", (2,)),
        ("sequence", "<u8"),
        ("stored_steps", "<u8"),
        ("produced_steps", "<u8"),
        ("flags", "<u8"),
    ]
)
WORDS = ROW.itemsize // 8
SEQUENCE, STORED_STEPS, PRODUCED_STEPS = 2, 3, 4  # which words of a row
USED, FINAL = 1, 2
FIRST_ROWS = 64


@dataclass(frozen=True, slots=True)
class StreamLedger:
    """Steps by what became of them: produced = stored + in_flight + abandoned + lost."""

    produced: int
    stored: int
    in_flight: int
    abandoned: int
    lost: int


class Streams:
    """The streams of one agent."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        rows = max(FIRST_ROWS, path.stat().st_size // ROW.itemsize if path.exists() else 0)
        self._map(rows)
        used = np.flatnonzero(self._table["flags"] & USED).tolist()
        self._rows = {incarnation_text(self._table["incarnation"][row]): row for row in used}
        self._free = used[-1] + 1 if used else 0
        self._stored_steps: int = sum(self._table["stored_steps"][used].tolist())
        # After a restart nobody has been heard of yet: each stream gets one lease time to report.
        self._heard = dict.fromkeys(self._rows, now)

    def _map(self, rows: int) -> None:
        self._table = map_array(self._path, ROW, (rows,))
        # Numbers one by one, which numpy takes four times as long for.
        self._words = self._table.view(np.uint64).data

    @property
    def stored_steps(self) -> int:
        """Of all streams, ever."""
        return self._stored_steps

    def mark(self, incarnation: str) -> int:
        """The last number stored; 0 before the first."""
        return self._number(incarnation, SEQUENCE)

    def stored_steps_of(self, incarnation: str) -> int:
        return self._number(incarnation, STORED_STEPS)

    def judge(self, incarnation: str, sequence: int) -> Judgement:
        expected = self.mark(incarnation) + 1
        if sequence == expected:
            return "next"
        return "duplicate" if sequence < expected else "gap"

    def advance(self, incarnation: str, sequence: int, stored: int, produced: int, now: float) -> None:
        """A segment was committed: its number and the stream's counts with it."""
        row = self._row(incarnation)
        words, first = self._words, row * WORDS
        self._stored_steps += stored - words[first + STORED_STEPS]
        words[first + STORED_STEPS] = stored
        words[first + SEQUENCE] = sequence
        self._raise_produced(row, produced)
        self._heard[incarnation] = now

    def report(self, incarnation: str, produced: int, final: bool, now: float) -> None:
        """What an actor says of itself. Once final, always final."""
        row = self._row(incarnation)
        self._raise_produced(row, produced)
        if final:
            self._table["flags"][row] = USED | FINAL
        self._heard[incarnation] = now

    def recover(self, slots: Array, now: float) -> None:
        """Brings the table up to the valid slots' metadata.

        A row of the table is written after its slot's commit, so a process that dies between the two, or in
        the middle of a row, leaves a slot with the row's number or a higher one: the slot is believed then.
        A row that is ahead of every slot was complete long before its slots were overwritten.
        """
        for slot in slots[np.argsort(slots["sequence"], kind="stable")]:
            incarnation, sequence = incarnation_text(slot["incarnation"]), int(slot["sequence"])
            if sequence >= self.mark(incarnation):
                self.advance(
                    incarnation, sequence, int(slot["stored_after"]), int(slot["produced_after"]), now
                )

    def live(self, now: float, lease_s: float) -> list[str]:
        """Streams that were heard of within the lease time and did not end on purpose."""
        return [
            incarnation
            for incarnation, row in self._rows.items()
            if now - self._heard[incarnation] <= lease_s and not self._table["flags"][row] & FINAL
        ]

    def ledger(self, now: float, lease_s: float, closing: bool = False) -> StreamLedger:
        """`closing`: no actor lives any more."""
        live = set() if closing else set(self.live(now, lease_s))
        in_flight = abandoned = lost = produced = 0
        for incarnation, row in self._rows.items():
            made = int(self._table["produced_steps"][row])
            missing = made - int(self._table["stored_steps"][row])
            produced += made
            if missing < 0 or self._table["flags"][row] & FINAL:
                lost += missing  # below 0: stored more than was ever produced, which must be seen
            elif incarnation in live:
                in_flight += missing
            else:
                abandoned += missing
        return StreamLedger(produced, self._stored_steps, in_flight, abandoned, lost)

    def produced_by(self) -> dict[str, int]:
        """What each incarnation said it had produced when last heard of."""
        return {
            incarnation: int(self._table["produced_steps"][row]) for incarnation, row in self._rows.items()
        }

    def as_bytes(self) -> bytes:
        """The rows in use as the file has them now."""
        return self._table[: self._free].tobytes()

    def sync(self) -> None:
        sync_file(self._path)

    def _number(self, incarnation: str, word: int) -> int:
        row = self._rows.get(incarnation)
        return 0 if row is None else self._words[row * WORDS + word]

    def _raise_produced(self, row: int, produced: int) -> None:
        place = row * WORDS + PRODUCED_STEPS
        self._words[place] = max(self._words[place], produced)

    def _row(self, incarnation: str) -> int:
        if incarnation not in self._rows:
            self._rows[incarnation] = self._add_row(incarnation)
        return self._rows[incarnation]

    def _add_row(self, incarnation: str) -> int:
        row = self._free
        if row == len(self._table):
            self._map(2 * row)
        self._table[row] = (incarnation_words(incarnation), 0, 0, 0, 0)
        self._table["flags"][row] = USED  # last: a row that was not finished does not exist
        self._free += 1
        return row
