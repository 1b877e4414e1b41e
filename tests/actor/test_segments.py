from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actor.policies import PolicyGroup
from services.actor.segments import Cut, SegmentWriter
from services.replay.buffer import AgentBuffer
from shared.codec import segment_checksum
from shared.config import LearnerConfig
from shared.layout import pack
from shared.messages import Segment
from shared.specs import AgentSpec, Discrete, vector_observation

AGENT = "agent_0"
GAMMA = 0.9
ENDS = ("terminated", "truncated", "closed")  # closed: the actor stopped in the middle of it


@dataclass
class Episode:
    """What truly happened in one slot from a reset to the end; step t has the version `first` + t."""

    length: int
    end: str
    first: int
    stack: int
    arrays: dict[str, np.ndarray] = field(init=False)
    shown: list[np.ndarray] = field(default_factory=list)  # the stack that the policy saw at each step

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.first)
        steps = self.length
        self.arrays = {
            "observation": rng.normal(size=(steps + 1, 2)).astype(np.float32),
            "action": rng.integers(0, 3, steps),
            "reward": rng.normal(size=steps).astype(np.float32),
            "terminated": np.zeros(steps, bool),
            "truncated": np.zeros(steps, bool),
            "turn": np.arange(steps, dtype=np.int32),
            "version": np.arange(self.first, self.first + steps),
        }
        if self.end != "closed":
            self.arrays[self.end][-1] = True

    def stacked(self, newest: int) -> np.ndarray:
        frames = range(newest - self.stack + 1, newest + 1)
        nothing = np.zeros(2, np.float32)
        return np.stack([self.arrays["observation"][t] if t >= 0 else nothing for t in frames])

    def row(self, step: int, n_step: int) -> dict[str, object]:
        last = min(self.length, step + n_step)
        rewards = self.arrays["reward"][step:last]
        return {
            "observation": self.stacked(step),
            "next_observation": self.stacked(last),
            "action": self.arrays["action"][step],
            "return": sum(GAMMA**k * float(reward) for k, reward in enumerate(rewards)),
            "discount": 0.0 if self.arrays["terminated"][last - 1] else GAMMA ** (last - step),
        }


@dataclass
class Game:
    """Slots whose episodes follow one another, each at its own pace, recorded as an actor does."""

    stack: int
    n_step: int
    segment_steps: int
    plan: list[list[tuple[int, str]]]  # by slot: (length, end) of each episode
    cuts: list[Cut] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = AgentSpec(observation=vector_observation(2), stack=self.stack, discrete=Discrete(n=3))
        first = 1
        self.episodes: list[list[Episode]] = []
        for slot_plan in self.plan:
            self.episodes.append([])
            for length, end in slot_plan:
                self.episodes[-1].append(Episode(length, end, first, self.stack))
                first += length

    @property
    def steps(self) -> int:
        return sum(episode.length for slot in self.episodes for episode in slot)

    def play(self) -> None:
        envs = len(self.plan)
        group = PolicyGroup(
            (AGENT,), self.spec, LearnerConfig.model_validate({"network": {"hidden": [1]}}), envs
        )
        writer = SegmentWriter(self.spec, envs, self.segment_steps, self.n_step)
        epoch, turn = np.zeros(envs, np.int64), np.zeros(envs, np.int64)
        writer.begin(np.ones(envs, bool), epoch)
        while True:
            playing = np.array([epoch[slot] < len(self.episodes[slot]) for slot in range(envs)])
            if not playing.any():
                break
            now = [self.episodes[slot][epoch[slot]] if playing[slot] else None for slot in range(envs)]
            group.observe([self._rows("observation", now, turn, 2)])
            for slot, episode in enumerate(now):
                if episode is not None:
                    episode.shown.append(group.stacks[0, slot].copy())
            names = [column.name for column in self.spec.step_columns]
            rows = {name: self._rows(name, now, turn, 0) for name in names}
            rows["observation"] = group.stacks[0, :, -1]
            writer.add(playing, rows)
            turn += playing
            ended = np.array([ep is not None and turn[slot] == ep.length for slot, ep in enumerate(now)])
            self.cuts.extend(writer.cut(ended, self._rows("observation", now, turn, 2)))
            turn[ended] = 0
            epoch += ended
            writer.begin(ended, epoch)
            group.forget(ended)
        assert writer.open_steps == 0

    @staticmethod
    def _rows(name: str, now: list[Episode | None], turn: np.ndarray, width: int) -> np.ndarray:
        example = next(episode for episode in now if episode is not None).arrays[name]
        rows = np.zeros((len(now), width) if width else len(now), example.dtype)
        for slot, episode in enumerate(now):
            if episode is not None:
                rows[slot] = episode.arrays[name][turn[slot]]
        return rows


EPISODES = st.lists(st.tuples(st.integers(1, 14), st.sampled_from(ENDS)), min_size=1, max_size=4)
GAMES = st.builds(
    Game,
    stack=st.integers(1, 4),
    n_step=st.integers(1, 4),
    segment_steps=st.integers(1, 6),
    plan=st.lists(EPISODES, min_size=1, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(game=GAMES)
def test_cut_segments_own_every_step_once_and_carry_their_true_context(game: Game) -> None:
    """Each slot's segments follow one another without a gap, and every row in them really happened."""
    game.play()
    for slot, episodes in enumerate(game.episodes):
        for epoch, episode in enumerate(episodes):
            start = 0
            for cut in (cut for cut in game.cuts if (cut.slot, cut.epoch) == (slot, epoch)):
                assert cut.before == min(game.stack - 1, start)
                assert cut.owned == min(game.segment_steps, episode.length - start)
                end = min(episode.length, start + cut.owned - 1 + game.n_step) + 1
                assert cut.rows == end - start + cut.before
                for column in game.spec.columns:
                    stop = end - (column.per == "step")
                    np.testing.assert_array_equal(
                        cut.arrays[column.name], episode.arrays[column.name][start - cut.before : stop]
                    )
                start += cut.owned
            assert start == episode.length
    assert sum(cut.owned for cut in game.cuts) == game.steps


def insert_all(game: Game, directory: Path) -> AgentBuffer:
    buffer = AgentBuffer(
        directory,
        AGENT,
        game.spec,
        capacity_steps=max(64, len(game.cuts) * game.segment_steps),
        segment_steps=game.segment_steps,
        n_step=game.n_step,
        gamma=GAMMA,
        alpha=0.0,
        priority_epsilon=1e-3,
        min_steps=1,
        samples_per_insert=1.0,
        tolerance_samples=1.0,
        seed=0,
        now=0.0,
    )
    produced = 0
    for sequence, cut in enumerate(game.cuts, start=1):
        produced += cut.owned
        segment = Segment(
            incarnation="0" * 32,
            agent=AGENT,
            sequence=sequence,
            produced_steps=produced,
            actor_index=0,
            slot=cut.slot,
            epoch=cut.epoch,
            before=cut.before,
            owned=cut.owned,
            rows=cut.rows,
            checksum=segment_checksum(pack(cut.arrays)),
        )
        assert buffer.insert(segment, cut.arrays, now=0.0) == "stored"
    return buffer


@settings(max_examples=40, deadline=None)
@given(game=GAMES)
def test_drawn_steps_are_what_was_played_and_what_the_policy_saw(game: Game) -> None:
    """Through a real buffer: stacks, n-step returns and discounts are the episode's, for every step."""
    game.play()
    with tempfile.TemporaryDirectory() as directory:
        buffer = insert_all(game, Path(directory))
        batch = buffer.draw(0, 2 * game.steps, beta=1.0)  # alpha 0 and two strata a step: all are drawn
    by_version = {
        episode.first + step: (episode, step)
        for slot in game.episodes
        for episode in slot
        for step in range(episode.length)
    }
    assert set(batch["version"].tolist()) == set(by_version)
    for place, version in enumerate(batch["version"].tolist()):
        episode, step = by_version[version]
        row = episode.row(step, game.n_step)
        np.testing.assert_array_equal(batch["observation"][place], episode.shown[step])
        for name in ("observation", "next_observation", "action"):
            np.testing.assert_array_equal(batch[name][place], row[name], err_msg=name)
        for name in ("return", "discount"):
            np.testing.assert_allclose(batch[name][place], row[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_segment_inside_an_episode_leaves_when_its_later_rows_exist() -> None:
    """With T = 2 and n = 3 the first segment waits for two steps beyond its own."""
    game = Game(stack=2, n_step=3, segment_steps=2, plan=[[(6, "terminated")]])
    writer = SegmentWriter(game.spec, 1, 2, 3)
    writer.begin(np.ones(1, bool), np.zeros(1, np.int64))
    episode, left_at = game.episodes[0][0], []
    for step in range(6):
        rows = {name: values[step : step + 1] for name, values in episode.arrays.items()}
        writer.add(np.ones(1, bool), rows)
        ended = np.array([step == 5])
        left_at += [step for _ in writer.cut(ended, episode.arrays["observation"][step + 1 : step + 2])]
    assert left_at == [3, 5, 5]


def test_cut_segment_is_not_changed_by_later_steps() -> None:
    """A segment that waits in the outbox owns its rows."""
    game = Game(stack=3, n_step=2, segment_steps=2, plan=[[(9, "truncated"), (9, "terminated")]])
    game.play()
    first = game.cuts[0]
    np.testing.assert_array_equal(first.arrays["version"], [1, 2, 3])
    assert len({cut.arrays.block.ctypes.data for cut in game.cuts}) == len(game.cuts)


@pytest.mark.parametrize("end", ENDS)
def test_end_of_an_episode_is_marked_as_what_it_was(end: str) -> None:
    """Termination, truncation and an actor that stopped are three different ends."""
    game = Game(stack=1, n_step=1, segment_steps=8, plan=[[(3, end)]])
    game.play()
    (cut,) = game.cuts
    assert cut.arrays["terminated"].tolist() == [False, False, end == "terminated"]
    assert cut.arrays["truncated"].tolist() == [False, False, end == "truncated"]
