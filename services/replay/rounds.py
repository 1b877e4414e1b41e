"""One agent's buffer in rounds (lockstep and sequential mode): what enters when, and what is drawn when.

A round enters whole, in the order (actor, environment slot, time), and only once every draw of the phase
before it was trained on; until then its segments are held in memory, unacknowledged. Draw i is made after
exactly the priority updates of draws up to i - K, K being the learner's prefetch. So what is drawn depends on
the config alone, not on who is faster. Knows nothing of sockets.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from services.replay.buffer import AgentBuffer
from shared.errors import BadMessage, ConfigError, Refused
from shared.layout import Array, Arrays, Block, Packed
from shared.segment_frame import AnySegment

Verdict = Literal["held", "duplicate", "gap"]
REMEMBERED_ROUNDS = 16
ROUNDS_AHEAD = 1  # a round is played once the one before the last is trained on: no honest actor is further
AT_REST = "rounds.npz"  # beside the ring's files, while the run is stopped


@dataclass(slots=True)
class Part:
    """What one actor sent of one round so far."""

    incarnation: str
    segments: list[tuple[AnySegment, Packed]] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """New priorities of one draw's rows."""

    index: Array
    generation: Array
    priority: Array


class RoundBuffer:
    """Wraps an AgentBuffer. `rounds` are stored, draws below `due_draws` may be made."""

    def __init__(self, buffer: AgentBuffer, *, actors: int, batch_size: int, prefetch: int) -> None:
        self.buffer = buffer
        self._actors, self._batch_size, self._prefetch = actors, batch_size, prefetch
        self.rounds = 0
        self.due_draws = 0
        self._due_after: dict[int, int] = {}  # by round; one without draws lets the next in
        self.next_draw = 0
        self.answered = 0  # all draws below it were trained on: their updates have arrived
        self._parts: dict[tuple[int, int], Part] = {}  # by round and actor
        self._held: dict[str, int] = {}  # by incarnation, in segments
        self._reached: dict[str, tuple[int, int]] = {}  # by incarnation: its newest round, and whose it plays
        self._updates: dict[int, Update] = {}  # arrived, not yet applied
        self._served: dict[int, Packed] = {}  # the last K batches, for who asks again
        self._at_rest: Path | None = None  # the file that is true until the next round enters

    # --- segments -----------------------------------------------------------------------------------------

    def offer(self, segment: AnySegment, arrays: Arrays | Block) -> Verdict:
        """Takes the next segment of a stream and keeps it until its round's turn."""
        if segment.actor_index >= self._actors:
            raise BadMessage(
                f"actor {segment.actor_index} in a run of {self._actors} actors; lockstep fixes actor.count"
            )
        expected = self.buffer.mark(segment.incarnation) + self.held(segment.incarnation) + 1
        if segment.sequence != expected:
            return "duplicate" if segment.sequence < expected else "gap"
        if not self.rounds <= segment.round <= self.rounds + ROUNDS_AHEAD:
            raise BadMessage(f"a segment of round {segment.round}; {self.rounds} rounds are stored")
        place = (segment.round, segment.actor_index)
        part = self._parts.get(place, Part(segment.incarnation))
        if part.closed:
            raise BadMessage(f"round {segment.round} of actor {segment.actor_index} was closed already")
        if part.incarnation != segment.incarnation:
            raise BadMessage(
                f"round {segment.round} of actor {segment.actor_index} was begun by another process; a round "
                "in two pieces would not be the one that was agreed"
            )
        reached, actor = self._reached.get(segment.incarnation, place)
        if segment.round < reached or segment.actor_index != actor:
            raise BadMessage(  # it would enter in another order than it came
                f"round {segment.round} of actor {segment.actor_index} in a stream that has reached round "
                f"{reached} of actor {actor}"
            )
        part.segments.append((segment, self.buffer.check(segment, arrays)))
        part.closed = segment.closes_round
        self._parts[place] = part
        self._reached[segment.incarnation] = place
        self._held[segment.incarnation] = self.held(segment.incarnation) + 1
        return "held"

    def held(self, incarnation: str) -> int:
        """Segments of this stream that wait for their round."""
        return self._held.get(incarnation, 0)

    def advance(self) -> set[str]:
        """Stores the next round if it is complete and its turn has come; whose streams moved."""
        parts = [self._parts.get((self.rounds, actor)) for actor in range(self._actors)]
        if self.answered < self.due_draws or not all(part is not None and part.closed for part in parts):
            return set()
        if self._at_rest is not None:
            self._at_rest.unlink(missing_ok=True)
            self._at_rest = None
        moved: set[str] = set()
        for actor in range(self._actors):
            for segment, arrays in self._parts.pop((self.rounds, actor)).segments:
                self.buffer.insert(segment, arrays)
                self._held[segment.incarnation] -= 1
                moved.add(segment.incarnation)
        self.due_draws = max(self.due_draws, int(self.buffer.limiter.due_samples // self._batch_size))
        self._due_after[self.rounds] = self.due_draws
        self._due_after.pop(self.rounds - REMEMBERED_ROUNDS, None)
        self.rounds += 1
        return moved

    def due_after(self, number: int) -> int | None:
        """How many draws are due once this round is stored; None: it is not stored yet."""
        if number >= self.rounds:
            return None
        if number not in self._due_after:
            raise Refused("out_of_order", f"phase {number} of a run that is in round {self.rounds}")
        return self._due_after[number]

    # --- batches ------------------------------------------------------------------------------------------

    def can_draw(self, draw: int) -> bool:
        """Whether it is this draw's turn, or it was made lately and is asked for again."""
        if draw in self._served:
            return True
        return draw == self.next_draw < self.due_draws and self.answered > draw - self._prefetch

    def draw(self, draw: int, batch_size: int, beta: float) -> Packed:
        if draw in self._served:
            return self._served[draw]
        if draw != self.next_draw:
            raise Refused("out_of_order", f"draw {draw} in lockstep; the next one is {self.next_draw}")
        if batch_size != self._batch_size:
            raise Refused(
                "bad_value", f"a batch of {batch_size}; in lockstep it is the config's {self._batch_size}"
            )
        for number in sorted(number for number in self._updates if number <= draw - self._prefetch):
            self._apply(self._updates.pop(number))
        batch = self.buffer.draw(draw, batch_size, beta)
        self.next_draw += 1
        self._served[draw] = batch
        self._served.pop(draw - self._prefetch, None)
        return batch

    def take_update(self, draw: int, index: Array, generation: Array, priority: Array) -> None:
        """What draw number `draw` was found to be worth; applied when its turn comes."""
        if draw < self.answered:
            return  # the learner repeats itself
        if draw >= self.next_draw or draw != self.answered:
            raise Refused(
                "out_of_order", f"priorities of draw {draw}; the next ones are those of {self.answered}"
            )
        self._updates[draw] = Update(index, generation, priority)
        self.answered += 1

    def _apply(self, update: Update) -> None:
        if len(update.index):
            self.buffer.update_priorities(update.index, update.generation, update.priority)

    @property
    def at_boundary(self) -> bool:
        """Every round that is stored was trained on."""
        return self.answered == self.due_draws

    def reason(self) -> str:
        """What is waited for, for people."""
        if not self.at_boundary:
            return f"round {self.rounds - 1} is trained on: {self.answered:,} of {self.due_draws:,} draws"
        parts = (self._parts.get((self.rounds, actor)) for actor in range(self._actors))
        missing = [str(actor) for actor, part in enumerate(parts) if part is None or not part.closed]
        return f"round {self.rounds} is not here yet from actor {', '.join(missing)}" if missing else ""

    # --- at rest ------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """For a run that stops between two rounds: where it stands, and the updates not yet applied."""
        counters = {"rounds": self.rounds, "due_draws": self.due_draws}
        arrays: dict[str, Array] = {}
        for draw, update in self._updates.items():
            arrays |= {
                f"{draw}/index": update.index,
                f"{draw}/generation": update.generation,
                f"{draw}/priority": update.priority,
            }
        temporary = directory / f"{AT_REST}.tmp.npz"
        with temporary.open("wb") as file:
            arrays["counters"] = np.frombuffer(json.dumps(counters).encode(), np.uint8)
            np.savez(file, allow_pickle=False, **arrays)
        temporary.replace(directory / AT_REST)
        self._at_rest = directory / AT_REST

    def load(self, directory: Path) -> None:
        """The inverse. The file stays until the next round enters: so long it is true."""
        path = directory / AT_REST
        if not path.exists():
            if self.buffer.inserted_steps:
                raise ConfigError(
                    f"{self.buffer.agent} was stopped in the middle of a round, or not trained in rounds: a "
                    "run that is repeated bit for bit cannot go on from there; begin it anew"
                )
            return
        (self.rounds, self.due_draws), self._updates = _read_at_rest(path)
        self.next_draw = self.answered = self.due_draws
        self._at_rest = path


def read_rounds(directory: Path) -> tuple[int, int]:
    """The rounds stored and the draws made of a buffer at rest; ConfigError if it is not."""
    return _read_at_rest(directory / AT_REST)[0]


def _read_at_rest(path: Path) -> tuple[tuple[int, int], dict[int, Update]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            counters = json.loads(arrays["counters"].tobytes())
            draws = sorted({int(name.split("/")[0]) for name in arrays.files if "/" in name})
            updates = {
                draw: Update(
                    arrays[f"{draw}/index"], arrays[f"{draw}/generation"], arrays[f"{draw}/priority"]
                )
                for draw in draws
            }
            return (int(counters["rounds"]), int(counters["due_draws"])), updates
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path.parent.name} was not stopped between two rounds ({error}): a run that is repeated bit "
            "for bit cannot go on from there; begin it anew"
        ) from None
