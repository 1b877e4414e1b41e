"""The one configuration of a run: what may be set, what it means, and what is allowed.

Read once, in this order, later ones winning: the defaults below, a YAML file, environment variables
(`ROOKERY_LEARNER__BATCH_SIZE=512`), flags (`--set learner.batch_size=512`). A key that does not exist is
refused with its name and the nearest one that does. Nothing else in Rookery reads the environment.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import ConfigError
from shared.specs import AGENT_ID_PATTERN

ENVIRONMENT_PREFIX = "ROOKERY_"

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the config: unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunConfig(Section):
    """How long to train, and where everything is kept."""

    dir: str = ""
    """The run directory; empty means runs/<world>-<date>-<number>."""
    minutes: Positive | None = 2.0
    """Training time; null means no limit. The clock stands still while paused."""
    agent_steps: Annotated[int, Field(ge=1)] | None = None
    """Ends the run after this many steps, summed over agents; null means no limit."""
    eval_episodes: Annotated[int, Field(ge=0)] = 300
    """Greedy epochs played at the end for `eval_return`; 0 plays none."""


class WorldConfig(Section):
    """What is played."""

    name: str = "treasure_hunt"
    """A built-in world, or your own as "package.module:factory"."""
    agents: Annotated[int, Field(ge=1, le=1000)] = 3
    """How many agents play in it."""
    max_turns: Annotated[int, Field(ge=1)] = 50
    """Turns in an epoch."""
    options: dict[str, Any] = {}
    """Passed on to the world's factory; the world says what it knows."""


class EpsilonConfig(Section):
    """How often an action is chosen at random.

    It falls from `start` to each environment slot's own floor, which lies on a ladder from `base` (slot 0)
    to base^(1 + `spread`) (the last slot): some explore much, some hardly.
    """

    start: Fraction = 1.0
    base: Fraction = 0.2
    spread: Annotated[float, Field(ge=0.0)] = 3.0
    decay_steps: Annotated[int, Field(ge=1)] = 8_000
    """Steps of one agent, over all actors, until the floor is reached."""


class ActorConfig(Section):
    """The processes that play."""

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    envs: Annotated[int, Field(ge=1, le=4096)] = 32
    """Environments in each actor, played side by side with one batched pass of the networks."""
    segment_steps: Annotated[int, Field(ge=1, le=16_384)] = 64
    """The longest segment; never more than world.max_turns."""
    window_segments: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Unacknowledged segments that an actor keeps for each agent before it waits."""
    epsilon: EpsilonConfig = EpsilonConfig()
    journal: bool = False
    """Write every segment's (stream, sequence, checksum) to logs/ before it is sent, for audits."""


class ReplayConfig(Section):
    """The replay service and its limiter."""

    services: Annotated[int, Field(ge=1, le=64)] = 1
    """How many replay services share the agents."""
    placement: dict[str, int] = {}
    """Which of them keeps an agent, by its id: {agent_0: 1}. They are numbered from 0; agents that are not
    named here take turns in the order of their names."""
    capacity_steps: Annotated[int, Field(ge=64)] = 131_072
    """Steps kept for each agent."""
    min_steps: Annotated[int, Field(ge=1)] = 2_000
    """No batch is drawn from fewer."""
    samples_per_insert: Positive = 8.0
    """How often a step is drawn, on average, before learners or actors have to wait."""
    tolerance: Annotated[float, Field(ge=0.0)] = 8.0
    """How far inserts and samples may run apart, in batches of the learner beyond one segment round."""
    sync_s: Positive = 30.0
    """A power cut takes at most the last sync_s seconds; a killed process takes nothing."""


class PriorityConfig(Section):
    """Prioritized replay: P(i) ~ (|td| + epsilon)^alpha, weights (N P)^-beta over their maximum."""

    alpha: Fraction = 0.6
    """0 is exactly uniform."""
    epsilon: Annotated[float, Field(ge=1e-30, allow_inf_nan=False)] = 1e-3
    """What even a step without error keeps; leaves are float32, in which less would be nothing."""
    beta_start: Fraction = 0.4
    beta_end: Fraction = 1.0
    beta_updates: Annotated[int, Field(ge=1)] = 20_000


class TargetConfig(Section):
    """How the target network follows: soft every update, hard every `hard_every` updates, or both."""

    mode: Literal["soft", "hard", "both"] = "soft"
    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    hard_every: Annotated[int, Field(ge=1)] = 500
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """During the first updates the target is copied every `warmup_every` updates."""
    warmup_every: Annotated[int, Field(ge=1)] = 50
    watchdog: Positive = 1e3
    """A target whose |Q| mean leaves the online network's by this factor is copied, counted and logged."""


class NetworkConfig(Section):
    """The network of one agent."""

    hidden: Annotated[tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(min_length=1)] = (128, 128)
    dueling: bool = True


class LearnerConfig(Section):
    """How one agent learns. `agents: {agent_1: {...}}` overrides any of it for one agent."""

    algorithm: str = "dqn"
    """A built-in algorithm: dqn."""
    network: NetworkConfig = NetworkConfig()
    double: bool = True
    n_step: Annotated[int, Field(ge=1, le=64)] = 3
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 256
    lr: Positive = 1e-3
    adam_epsilon: Positive = 1e-5
    reward_scale: Positive = 0.1
    """Rewards are multiplied by this before they become targets."""
    clip_norm: Positive = 10.0
    """Gradients are scaled down to this norm."""
    priority: PriorityConfig = PriorityConfig()
    target: TargetConfig = TargetConfig()
    prefetch: Annotated[int, Field(ge=1, le=64)] = 4
    """Sample requests in flight."""
    publish_updates: Annotated[int, Field(ge=1)] = 50
    """A new version after this many updates,"""
    publish_s: Positive = 1.0
    """or after this many seconds with at least one update."""
    checkpoint_s: Positive = 10.0
    """The parameter server gets a checkpoint this often; a lost learner repeats at most this much."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    device: str = "auto"
    """auto takes a GPU if there is one, agents taking turns; or cpu, cuda:0, ..."""


class ParamServerConfig(Section):
    """Versions and leases."""

    keep_versions: Annotated[int, Field(ge=1)] = 10
    delta: bool = False
    """Broadcast only tensors that differ from the last full version."""
    full_every: Annotated[int, Field(ge=1)] = 20
    """With delta: every so many versions a full one."""
    broadcast_dtype: Literal["float32", "float16"] = "float32"
    lease_s: Annotated[float, Field(ge=0.5, le=3600.0)] = 5.0
    """A service that is silent for this long loses its lease."""
    heartbeat_s: Annotated[float, Field(gt=0.0, le=60.0)] = 1.0
    drain_s: Positive = 10.0
    """Draining ends when everyone is done, or after this long."""


class ReplayEndpoints(Section):
    """Where one replay service listens."""

    segments: str = "tcp://127.0.0.1:5701"
    requests: str = "tcp://127.0.0.1:5702"


class Endpoints(Section):
    """Where services listen. Fixed once per run; `rookery train` picks free ports by itself."""

    replay: tuple[ReplayEndpoints, ...] = (ReplayEndpoints(),)
    params: str = "tcp://127.0.0.1:5703"
    broadcast: str = "tcp://127.0.0.1:5704"


class LimitsConfig(Section):
    """Bounds on what may arrive."""

    max_message_bytes: Annotated[int, Field(ge=65_536)] = 256 * 2**20
    """Larger frames end the connection before they are read."""
    send_buffer_bytes: Annotated[int, Field(ge=0, le=2**30)] = 256 * 2**10
    """What of replay's batches may wait in the system's socket buffer for one learner. Short is fast: what
    waits there long has left the caches. It bounds the rate over links with long round trips, to about
    2 * send_buffer_bytes in each round trip; 0 lets the system choose."""


class Config(Section):
    """Everything that can be set."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    run: RunConfig = RunConfig()
    world: WorldConfig = WorldConfig()
    actor: ActorConfig = ActorConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    agents: dict[Annotated[str, Field(pattern=AGENT_ID_PATTERN)], dict[str, Any]] = {}
    """For single agents, by id: what differs from `learner`."""
    param_server: ParamServerConfig = ParamServerConfig()
    endpoints: Endpoints = Endpoints()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        self._check_agents(self.agents, "agents")
        self._check_agents(self.replay.placement, "replay.placement")
        for agent in self.agents:
            try:
                self.learner_for(agent)
            except pydantic.ValidationError as error:
                raise ValueError(_explain(error, LearnerConfig, f"agents.{agent}.")) from None
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
        if self.param_server.heartbeat_s * 2 > self.param_server.lease_s:
            raise ValueError(
                f"param_server.lease_s ({self.param_server.lease_s}) must be at least twice "
                f"heartbeat_s ({self.param_server.heartbeat_s}), or one late heartbeat loses the lease"
            )
        return self

    def _check_agents(self, named: Iterable[str], key: str) -> None:
        ids = {f"agent_{number}" for number in range(self.world.agents)}
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

    @property
    def segment_steps(self) -> int:
        return min(self.actor.segment_steps, self.world.max_turns)


def load_config(
    path: Path | None = None,
    settings: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The config from a file, the environment and `a.b=c` settings, or ConfigError in words."""
    data: dict[str, Any] = _read_yaml(path) if path else {}
    for path_in_config, value in _environment_settings(os.environ if environment is None else environment):
        data = merged(data, _nested(path_in_config, value))
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {setting!r}: write key=value, for example --set learner.batch_size=512")
        data = merged(data, _nested(key.strip().split("."), _scalar(text, f"--set {key}")))
    return build_config(data)


def build_config(data: Mapping[str, Any]) -> Config:
    """A validated config, or ConfigError that names each wrong key or value."""
    try:
        return Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error)) from None


def dump_config(config: Config) -> str:
    """The config as YAML, every value included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top, section by section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both_are_sections = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both_are_sections else value  # type: ignore[arg-type]
    return result


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, found {type(data).__name__}")
    return data


def _environment_settings(environment: Mapping[str, str]) -> Iterable[tuple[list[str], Any]]:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            yield path, _scalar(environment[name], name)


def _scalar(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{where}: {text!r} is not a YAML value") from None


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _explain(error: pydantic.ValidationError, section: type[BaseModel] = Config, prefix: str = "") -> str:
    known = known_keys(section, prefix)
    return "\n".join(_explain_one(problem, known, prefix) for problem in error.errors(include_url=False))


def _explain_one(problem: Any, known: list[str], prefix: str) -> str:
    where = [str(part) for part in problem["loc"]]
    key = prefix + ".".join(where)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            where[-1], [name.rsplit(".", 1)[-1] for name in known], n=1, cutoff=0.6
        )
        hint = f"; did you mean {_full_name(near[0], known)}?" if near else ""
        return f"unknown key {key}{hint}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    return f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _full_name(name: str, known: list[str]) -> str:
    return name if name in known else next(key for key in known if key.rsplit(".", 1)[-1] == name)


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key that can be set, dotted."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys.extend(known_keys(annotation, f"{prefix}{name}."))
        keys.append(prefix + name)
    return keys
