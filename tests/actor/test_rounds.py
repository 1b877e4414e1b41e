"""Playing in rounds: a round is a function of its number, whoever plays it and whatever was played before."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.actor.rollout import Played
from services.actor.round_service import RoundActorService
from services.actor.rounds import RoundPlayer
from services.actor.segments import Cut
from shared.algorithms import build_network
from shared.codec import Received
from shared.config import Config, load_config
from shared.errors import BrokenInvariant
from shared.layout import Arrays
from shared.messages import LeaseGrant
from shared.schedule import Schedule

WORLDS = ("treasure_hunt", "short_lives:short_lives")
Round = tuple[dict[str, list[Cut]], Played]


def make_config(world: str = "treasure_hunt", **changes: object) -> Config:
    settings: dict[str, object] = {
        "seed": 5,
        "world.name": world,
        "world.agents": 2,
        "world.max_turns": 12,
        "actor.envs": 3,
        "actor.count": 2,
        "actor.segment_steps": 5,
        "actor.epsilon.decay_steps": 200,
        "learner.network.hidden": [8],
        "parallel.async_learning": False,
    }
    return load_config(
        None, [f"{key}={json.dumps(value)}" for key, value in (settings | changes).items()], {}
    )


def weights(player: RoundPlayer, config: Config, version: int) -> dict[str, Arrays]:
    """Any weights of this version: the same numbers for everybody who asks."""
    own: dict[str, Arrays] = {}
    for place, (agent, spec) in enumerate(player.specs.items()):
        rng = np.random.default_rng([version, place])
        tensors = build_network(spec, config.learner_for(agent)).state_dict()
        own[agent] = {
            name: rng.normal(size=tensor.shape).astype(np.float32) for name, tensor in tensors.items()
        }
    return own


def play(player: RoundPlayer, config: Config, number: int) -> Round:
    version = Schedule.of(config).version_for(number)
    for agent, tensors in weights(player, config, version).items():
        player.load(agent, version, tensors)
    return player.play(number)


def digest(played: Round) -> str:
    """Everything about a round, in its order."""
    whole = hashlib.sha256()
    for agent, cuts in played[0].items():
        for cut in cuts:
            whole.update(f"{agent} {cut.slot} {cut.epoch} {cut.before} {cut.owned} {cut.rows}".encode())
            for name, rows in cut.arrays.items():
                whole.update(name.encode() + rows.tobytes())
    whole.update(repr(played[1]).encode())
    return whole.hexdigest()


@pytest.mark.parametrize("world", WORLDS)
def test_round_played_again_or_after_others_is_the_same(world: str) -> None:
    """Nothing of an earlier round is left over: not in the world, not in the dice, not in the stacks."""
    config = make_config(world)
    player = RoundPlayer(config, 1)
    in_order = [digest(play(player, config, number)) for number in range(4)]
    assert len(set(in_order)) == 4
    other = RoundPlayer(config, 1)
    assert digest(play(other, config, 3)) == in_order[3]
    assert [digest(play(other, config, number)) for number in (2, 0, 2, 1)] == [
        in_order[number] for number in (2, 0, 2, 1)
    ]


def test_round_of_another_actor_or_seed_is_another() -> None:
    """Two actors do not play the same twice over."""
    config = make_config()
    rounds = {
        digest(play(RoundPlayer(make_config(seed=seed), index), config, 2))
        for seed in (5, 6)
        for index in (0, 1)
    }
    assert len(rounds) == 4


def test_round_in_another_process_is_the_same() -> None:
    """Neither addresses in memory nor the order of hashes matter."""
    config = make_config(WORLDS[1])
    script = (
        "import test_rounds as t\n"
        "from services.actor.rounds import RoundPlayer\n"
        f"config = t.make_config({WORLDS[1]!r})\n"
        "print(t.digest(t.play(RoundPlayer(config, 0), config, 7)))\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r})\n{script}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    player = RoundPlayer(config, 0)
    play(player, config, 1)
    assert done.stdout.strip() == digest(play(player, config, 7))


@pytest.mark.parametrize("world", WORLDS)
def test_segments_of_a_round_come_by_slot_and_time(world: str) -> None:
    """The order in which replay takes them; the last one of each agent closes the round."""
    config = make_config(world)
    segments, _played = play(RoundPlayer(config, 0), config, 3)
    assert set(segments) == {"agent_0", "agent_1"}
    for cuts in segments.values():
        moments = [(cut.slot, cut.epoch, int(cut.arrays["turn"][cut.before])) for cut in cuts]
        assert moments == sorted(moments)
        assert {cut.slot for cut in cuts} == {0, 1, 2}


@pytest.mark.parametrize("world", WORLDS)
def test_steps_and_returns_of_a_round_are_those_in_its_segments(world: str) -> None:
    """Owned steps are what was produced; returns are summed over the epochs that ended in the round."""
    config = make_config(world)
    player = RoundPlayer(config, 0)
    total = dict.fromkeys(player.specs, 0)
    for number in range(3):
        segments, played = play(player, config, number)
        owned = {agent: sum(cut.owned for cut in cuts) for agent, cuts in segments.items()}
        assert played.env_steps == 3 * 12
        assert played.agent_steps == sum(owned.values())
        total = {agent: total[agent] + steps for agent, steps in owned.items()}
        assert player.produced_steps == total
        for agent, cuts in segments.items():
            assert played.return_sums[agent] == pytest.approx(_rewards_of_ended_epochs(segments, cuts))


def _rewards_of_ended_epochs(segments: dict[str, list[Cut]], cuts: list[Cut]) -> float:
    """An epoch has ended when every agent's last step in it has an end flag."""
    ends: dict[int, dict[str, bool]] = {}
    for agent, each in segments.items():
        for cut in each:
            last = slice(cut.before, cut.before + cut.owned)
            over = cut.arrays["terminated"][last].any() or cut.arrays["truncated"][last].any()
            ends.setdefault(cut.epoch, {})[agent] = bool(over)
    ended = {epoch for epoch, agents in ends.items() if all(agents.values())}
    return sum(
        float(cut.arrays["reward"][cut.before : cut.before + cut.owned].sum())
        for cut in cuts
        if cut.epoch in ended
    )


def test_round_of_short_lives_begins_new_epochs_and_cuts_the_last_ones() -> None:
    """Agents that die early leave the others playing; what is open at the end is cut, not declared ended."""
    config = make_config(WORLDS[1], **{"world.max_turns": 40, "learner.n_step": 3})
    segments, played = play(RoundPlayer(config, 0), config, 0)
    assert played.epochs > 3
    assert played.agent_steps < 2 * 3 * 40
    cut_off = 0
    for cuts in segments.values():
        by_episode: dict[tuple[int, int], list[Cut]] = {}
        for cut in cuts:
            by_episode.setdefault((cut.slot, cut.epoch), []).append(cut)
        for episode in by_episode.values():
            cut_off += _check_episode(episode)
    assert cut_off > 0, "no round was cut in the middle of an epoch: the test shows nothing"


def _check_episode(cuts: list[Cut], stack: int = 3, n_step: int = 3) -> bool:
    """All its steps once, each segment with the frames and rows it needs; whether it was cut off."""
    turns = np.concatenate([cut.arrays["turn"][cut.before : cut.before + cut.owned] for cut in cuts])
    np.testing.assert_array_equal(turns, np.arange(len(turns)))
    for cut in cuts:
        first = int(cut.arrays["turn"][cut.before])
        assert cut.before == min(first, stack - 1)
        steps_after = len(turns) - (first + cut.owned)
        assert cut.rows == cut.before + cut.owned + min(n_step - 1, steps_after) + 1
        assert len(cut.arrays["observation"]) == cut.rows
        # What comes after the last step is what was seen then, not the next epoch's first look.
        np.testing.assert_allclose(
            cut.arrays["observation"][cut.before :, 0],
            np.arange(first, first + cut.rows - cut.before) / 10,
            rtol=1e-6,
        )
    flags = cuts[-1].arrays["terminated"] | cuts[-1].arrays["truncated"]
    assert not any(
        (cut.arrays["terminated"] | cut.arrays["truncated"])[: cut.owned - 1].any() for cut in cuts
    )
    return not flags[-1]


def test_round_is_played_with_the_loaded_versions() -> None:
    """Every step says which weights chose its action."""
    config = make_config()
    player = RoundPlayer(config, 0)
    for number, version in ((0, 1), (1, 1), (2, 2)):
        segments, _ = play(player, config, number)
        for cuts in segments.values():
            assert {int(v) for cut in cuts for v in cut.arrays["version"]} == {version}


def test_turn_by_turn_a_round_is_the_same_as_at_once() -> None:
    """A service plays it in pieces, between heartbeats."""
    config = make_config()
    player, pieces = RoundPlayer(config, 0), RoundPlayer(config, 0)
    whole = digest(play(player, config, 0))
    for agent, tensors in weights(pieces, config, 1).items():
        pieces.load(agent, 1, tensors)
    assert not pieces.playing
    pieces.begin(0)
    turns = 1
    while pieces.turn():
        assert pieces.playing
        turns += 1
    assert digest(pieces.end()) == whole
    assert turns == 12
    assert not pieces.playing


def test_actor_whose_lease_becomes_another_index_ends() -> None:
    """Two actors that play for one index would send one round twice and another never."""
    actor = SimpleNamespace(index=1)
    RoundActorService._on_new_lease(actor, Received(LeaseGrant(index=1, lease_s=1.0), {}))  # type: ignore[arg-type]
    with pytest.raises(BrokenInvariant, match="as actor 1 lapsed and the new one is as actor 2"):
        RoundActorService._on_new_lease(actor, Received(LeaseGrant(index=2, lease_s=1.0), {}))  # type: ignore[arg-type]
