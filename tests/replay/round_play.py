"""What actors send of rounds, and the schedule applied to a plain buffer: the measure of `RoundBuffer`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from replay_episodes import Episode, Sender, make_buffer, make_spec

from services.replay.buffer import AgentBuffer
from services.replay.rounds import RoundBuffer
from shared.messages import Segment

SPEC = make_spec()
BATCH = 6
Offer = tuple[Segment, dict[str, np.ndarray]]


def make_rounds(directory: Path, *, actors: int = 2, prefetch: int = 2, **changes: Any) -> RoundBuffer:
    buffer = small_buffer(directory, **changes)
    return RoundBuffer(buffer, actors=actors, batch_size=BATCH, prefetch=prefetch)


def small_buffer(directory: Path, **changes: Any) -> AgentBuffer:
    """Rounds of some twenty steps go round its ring after three of them."""
    settings: dict[str, Any] = {"capacity_steps": 64, "min_steps": 10, "samples_per_insert": 1.0}
    return make_buffer(directory, SPEC, **(settings | changes))


@dataclass
class Player:
    """One actor's rounds as its stream carries them."""

    index: int
    lengths: tuple[int, ...] = (5, 3)  # of each slot's episode
    sender: Sender = field(init=False)

    def __post_init__(self) -> None:
        self.sender = Sender(SPEC, number=self.index + 1)

    def round(self, number: int) -> list[Offer]:
        """The segments of a round, by slot and time."""
        pieces = [
            (slot, lengths, arrays)
            for slot, length in enumerate(self.lengths)
            for lengths, arrays in self._episode(number, slot, length).cut(4, 3)
        ]
        return [
            (self._next(number, slot, lengths, arrays, closes=place == len(pieces) - 1), arrays)
            for place, (slot, lengths, arrays) in enumerate(pieces)
        ]

    def _episode(self, number: int, slot: int, length: int) -> Episode:
        return Episode(SPEC, 10_000 * number + 1_000 * self.index + 100 * slot, length, "truncated")

    def _next(
        self, number: int, slot: int, lengths: dict[str, int], arrays: dict[str, np.ndarray], closes: bool
    ) -> Segment:
        self.sender.sequence += 1
        self.sender.produced += lengths["owned"]
        place = {"actor_index": self.index, "slot": slot, "round": number, "closes_round": closes}
        return self.sender.segment(self.sender.sequence, lengths, arrays, **place)


def priorities_of(batch: dict[str, np.ndarray]) -> np.ndarray:
    """What a learner might find: a number of its own for each step."""
    return ((batch["version"] * 7919) % 97 / 10).astype(np.float32)


def as_bytes(batch: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in batch.items()}


def beta_of(draw: int) -> float:
    return min(1.0, 0.4 + draw / 50)


def expected_batches(
    directory: Path, players: list[Player], rounds: int, prefetch: int
) -> Iterator[dict[str, bytes]]:
    """Each batch by the rule: rounds in order, and before draw i the updates of draws up to i - K."""
    buffer, made = small_buffer(directory), 0
    updates: list[tuple[np.ndarray, ...]] = []
    for number in range(rounds):
        for player in players:
            for segment, arrays in player.round(number):
                assert buffer.insert(segment, arrays) == "stored"
        while (made + 1) * BATCH <= buffer.limiter.due_samples:
            if made - prefetch >= 0:
                buffer.update_priorities(*updates[made - prefetch])
            batch = buffer.draw(made, BATCH, beta_of(made))
            updates.append((batch["index"], batch["generation"], priorities_of(batch)))
            made += 1
            yield as_bytes(batch)


class Learner:
    """Draws and answers as far as it is let."""

    def __init__(self, rounds: RoundBuffer) -> None:
        self.rounds = rounds
        self.drawn: dict[int, dict[str, bytes]] = {}
        self._unanswered: list[tuple[int, dict[str, np.ndarray]]] = []

    def draw(self) -> bool:
        """The next draw, if its turn has come."""
        number = self.rounds.next_draw
        if not self.rounds.can_draw(number):
            return False
        batch = self.rounds.draw(number, BATCH, beta_of(number))
        self.drawn[number] = as_bytes(batch)
        self._unanswered.append((number, dict(batch)))
        return True

    def answer(self) -> bool:
        """The priorities of the oldest batch that has none yet."""
        if not self._unanswered:
            return False
        number, batch = self._unanswered.pop(0)
        self.rounds.take_update(number, batch["index"], batch["generation"], priorities_of(batch))
        return True

    def train(self) -> None:
        """Everything that is due."""
        while self.draw() or self.answer():
            pass
