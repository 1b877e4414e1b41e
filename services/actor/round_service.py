"""An actor in lockstep: plays the rounds that it is granted, each with exactly the versions that are agreed.

The parameter server says which round may be played with which versions; they are fetched, the round is played
and sent, the next one is asked for. Sending, acknowledgements and heartbeats are every actor's.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.actor.exploration import epsilons, ladder_floors
from services.actor.rollout import Played
from services.actor.rounds import RoundPlayer
from services.actor.segments import Cut
from services.actor.service import ActorService
from shared.codec import Received
from shared.errors import BrokenInvariant, ConfigError, RookeryError, WorldError
from shared.logs import get_logger
from shared.messages import LeaseGrant, RoundGrant, RoundRequest, RunNotice, SnapshotRequest, Weights, expect
from shared.schedule import Schedule
from shared.specs import AgentSpec

log = get_logger()

ROUND_TIMEOUT_S = 30.0  # training may take long; asking again costs nothing
ASK_AGAIN_S = 1.0
LAST_SUMMARY_S = 1.0


class RoundActorService(ActorService):
    """Plays round by round."""

    def open_world(self, index: int) -> Mapping[str, AgentSpec]:
        try:
            self.player = RoundPlayer(self.config, index)
        except WorldError as error:
            raise ConfigError(str(error)) from error
        self.schedule = Schedule.of(self.config)
        self.floors = ladder_floors(self.config.actor.epsilon, index, self.config.actor.envs)
        self.round: int | None = None  # the one that is played, or was played last
        self.asking = False
        self.awaited: dict[str, int] = {}  # agents whose version is on its way
        self.unreported = Played(return_sums=dict.fromkeys(self.player.specs, 0.0))
        return self.player.specs

    # --- the loop ---------------------------------------------------------------------------------------

    def work(self) -> bool:
        self._pump()
        if not self.active:
            self._wait(self._why_idle())
            return False
        if not self.player.playing:
            self._ask_for_round()
            waits_for = f"round {self.round + 1}" if self.round is not None else "the first round"
            self._wait(f"the learners: {waits_for} needs their newest weights")
            return False
        self._go_on()
        self.turns += 1
        if not self.player.turn():
            self._end_round()
        return True

    def _ask_for_round(self) -> None:
        if self.asking:
            return
        assert self.index is not None
        self.asking = True
        number = None if self.round is None else self.round + 1
        self.params.ask(
            RoundRequest(index=self.index, round=number),
            on_reply=self._on_round_grant,
            on_failure=self._on_no_round,
            timeout_s=ROUND_TIMEOUT_S,
        )

    def _on_round_grant(self, received: Received) -> None:
        grant = expect(received.message, RoundGrant)
        self.round, self.awaited = grant.round, dict(grant.versions)
        for agent, version in grant.versions.items():
            self._fetch(agent, version)

    def _on_no_round(self, error: RookeryError) -> None:
        self.loop.after(ASK_AGAIN_S, self._may_ask_again)
        log.info("no round yet", reason=str(error))

    def _may_ask_again(self) -> None:
        self.asking = False

    def _fetch(self, agent: str, version: int) -> None:
        """Exactly this version, whatever is newest."""

        def on_snapshot(received: Received) -> None:
            weights = expect(received.message, Weights)
            self.player.load(agent, weights.version, received.arrays)
            self.awaited.pop(agent, None)
            if not self.awaited:
                self.asking = False
                assert self.round is not None
                self.player.begin(self.round)

        def on_failure(error: RookeryError) -> None:
            log.warning("the round's weights did not come", agent=agent, version=version, reason=str(error))
            self.loop.after(ASK_AGAIN_S, lambda: self._fetch(agent, version))

        self.params.ask(
            SnapshotRequest(agent=agent, version=version), on_reply=on_snapshot, on_failure=on_failure
        )

    def _end_round(self) -> None:
        segments, played = self.player.end()
        for agent, cuts in segments.items():
            for place, cut in enumerate(cuts):
                self.take_cut(agent, cut, closes_round=place == len(cuts) - 1)
        self._add_played(played)
        self._pump()

    def _add_played(self, played: Played) -> None:
        total = self.unreported
        total.epochs += played.epochs
        total.env_steps += played.env_steps
        total.agent_steps += played.agent_steps
        for agent, return_sum in played.return_sums.items():
            total.return_sums[agent] += return_sum

    # --- what every actor is asked ------------------------------------------------------------------------

    def current_round(self) -> int:
        return self.round or 0

    def produced_steps(self) -> dict[str, int]:
        return self.player.produced_steps

    def take_played(self) -> Played:
        played, self.unreported = self.unreported, Played(return_sums=dict.fromkeys(self.player.specs, 0.0))
        return played

    def open_segments(self) -> list[tuple[str, Cut]]:
        """None: what was begun of a round is played again by whoever resumes the run."""
        return []

    def wind_down(self) -> None:
        super().wind_down()
        # Rounds are counted exactly: what is on its way is confirmed first, the last words carry the rest.
        self.loop.turn_until(lambda: self.summary is None, LAST_SUMMARY_S)

    def _on_new_lease(self, received: Received) -> None:
        index = expect(received.message, LeaseGrant).index
        if index != self.index:
            raise BrokenInvariant(
                f"the lease as actor {self.index} lapsed and the new one is as actor {index}: its rounds "
                "would be another actor's"
            )

    def subscribe(self) -> None:
        """Weights are fetched by version."""

    def on_run_notice(self, notice: RunNotice) -> None:
        """Nothing here depends on what others are doing at the moment."""

    def mean_epsilon(self) -> float:
        steps = self.schedule.steps_before(self.current_round(), 0)
        return float(epsilons(self.config.actor.epsilon, self.floors, steps).mean())
