"""The whole config, and what must fit together across its sections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import pydantic
from pydantic import Field, model_validator

from shared.config.explain import explain, merged
from shared.config.learner import WITHOUT_LEARNER, LearnerConfig
from shared.config.sections import (
    ActorConfig,
    Endpoints,
    LimitsConfig,
    ParallelConfig,
    ParamServerConfig,
    ReplayConfig,
    RunConfig,
    Section,
    SecurityConfig,
    WorldConfig,
)
from shared.specs import AGENT_ID_PATTERN


class Config(Section):
    """Everything that can be set."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    run: RunConfig = RunConfig()
    world: WorldConfig = WorldConfig()
    actor: ActorConfig = ActorConfig()
    parallel: ParallelConfig = ParallelConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    agents: dict[Annotated[str, Field(pattern=AGENT_ID_PATTERN)], dict[str, Any]] = Field(default={})
    """For single agents, by id: what differs from `learner`."""
    param_server: ParamServerConfig = ParamServerConfig()
    endpoints: Endpoints = Endpoints()
    limits: LimitsConfig = LimitsConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        self._check_agents(self.agents, "agents")
        self._check_agents(self.replay.placement, "replay.placement")
        for agent in self.agents:
            try:
                self.learner_for(agent)
            except pydantic.ValidationError as error:
                raise ValueError(explain(error, LearnerConfig, f"agents.{agent}.")) from None
        self._check_who_learns()
        for agent, number in self.replay.placement.items():
            if not 0 <= number < self.replay.services:
                raise ValueError(
                    f"replay.placement.{agent} = {number}: no such replay service; with replay.services = "
                    f"{self.replay.services} they are 0 to {self.replay.services - 1}"
                )
        if self.replay.min_steps > self.replay.capacity_steps:
            raise ValueError(
                f"replay.min_steps ({self.replay.min_steps}) is more than "
                f"replay.capacity_steps ({self.replay.capacity_steps}): nothing could ever be drawn"
            )
        if self.parallel.mode != "async":
            self._check_repeatable()
        if self.param_server.heartbeat_s * 2 > self.param_server.lease_s:
            raise ValueError(
                f"param_server.lease_s ({self.param_server.lease_s}) must be at least twice "
                f"heartbeat_s ({self.param_server.heartbeat_s}), or one late heartbeat loses the lease"
            )
        return self

    def _check_repeatable(self) -> None:
        """What stands in the way of a run that is the same bit for bit."""
        mode = self.parallel.mode
        for agent in ("", *self.agents):
            learner = self.learner_for(agent)
            if learner.workers > 1:
                raise ValueError(
                    f"learner.workers = {learner.workers}: several gradient workers step in the order in "
                    f"which they happen to be done, and {mode} is repeatable; set it to 1"
                )
            if learner.threads > 1 and mode == "lockstep":  # alone, sequential mode may be fast instead
                raise ValueError(
                    f"learner.threads = {learner.threads}: sums made by several threads may be rounded "
                    f"otherwise than those of one, and {mode} is repeatable; set it to 1"
                )
        if self.param_server.broadcast_dtype != "float32":
            raise ValueError(
                f"param_server.broadcast_dtype = {self.param_server.broadcast_dtype}: in {mode} actors play "
                "with exactly the learners' weights; set it to float32"
            )
        if self.param_server.keep_versions < 3:
            raise ValueError(
                f"param_server.keep_versions = {self.param_server.keep_versions}: in {mode} actors play with "
                "the version before the newest; keep at least 3"
            )

    def _check_who_learns(self) -> None:
        """Only of agents with a learner is there anything to place, and there must be one."""
        for agent, overrides in self.agents.items():
            algorithm = self.algorithm_of(agent)
            if overrides.get("script") and algorithm != "scripted":
                raise ValueError(
                    f"agents.{agent}.script is set, but its algorithm is {algorithm!r}; "
                    "set algorithm to scripted, or leave out script"
                )
        for agent in self.replay.placement:
            if not self.learns(agent):
                raise ValueError(
                    f"replay.placement.{agent}: {agent} is {self.algorithm_of(agent)}, "
                    "it has no buffer to place"
                )
        if not self.learning_agents:
            raise ValueError(
                "nobody learns: every agent is random or scripted; give at least one agent an algorithm "
                'that learns, for example agents: {agent_0: {algorithm: "dqn"}}'
            )

    def _check_agents(self, named: Iterable[str], key: str) -> None:
        ids = set(self._agent_ids)
        for agent in named:
            if agent not in ids:
                raise ValueError(
                    f"{key}.{agent}: no such agent; with world.agents = {self.world.agents} "
                    f"they are agent_0 to agent_{self.world.agents - 1}"
                )

    def learner_for(self, agent: str) -> LearnerConfig:
        """The settings of one agent's learner: `learner` with what `agents` says of it on top."""
        overrides = self.agents.get(agent)
        if not overrides:
            return self.learner
        return LearnerConfig.model_validate(merged(self.learner.model_dump(), overrides))

    def learns(self, agent: str) -> bool:
        """Whether the agent has a learner and a buffer; a random or scripted one has neither."""
        return self.algorithm_of(agent) not in WITHOUT_LEARNER

    def algorithm_of(self, agent: str) -> str:
        """The agent's algorithm by name; cheap, unlike `learner_for`, which validates."""
        return str(self.agents.get(agent, {}).get("algorithm", self.learner.algorithm))

    @property
    def learning_agents(self) -> tuple[str, ...]:
        """The agents that have a learner and a buffer, in acting order."""
        return tuple(agent for agent in self._agent_ids if self.learns(agent))

    @property
    def _agent_ids(self) -> tuple[str, ...]:
        return tuple(f"agent_{number}" for number in range(self.world.agents))

    @property
    def segment_steps(self) -> int:
        return min(self.actor.segment_steps, self.world.max_turns)
