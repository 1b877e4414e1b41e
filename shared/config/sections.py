"""The sections of the config but for the learner's: each key with its meaning and its bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Mode = Literal["async", "lockstep", "sequential"]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
MAX_SAMPLES_PER_INSERT = 1e6  # far above all use, far below where sums of steps times it lose a sample


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
    """Ends the run after this many steps, summed over the agents that learn; null means no limit."""
    manifest_minutes: Positive = 10.0
    """Lockstep and sequential: how often the whole run is copied, to go back to if a process dies."""
    eval_episodes: Annotated[int, Field(ge=0)] = 300
    """Greedy epochs played at the end for `eval_return`; 0 plays none."""
    stay: bool = False
    """A service that finds the run finished waits until it is resumed, instead of leaving: for containers,
    which are started again whenever they end."""
    health_socket: str = ""
    """Where a service answers `python -m shared.health`: the path of a unix socket; empty: nowhere."""


class WorldConfig(Section):
    """What is played."""

    name: str = "treasure_hunt"
    """A built-in world, or your own as "package.module:factory"."""
    agents: Annotated[int, Field(ge=1, le=1000)] = 3
    """How many agents play in it."""
    max_turns: Annotated[int, Field(ge=1)] = 50
    """Turns in an epoch."""
    options: dict[str, Any] = Field(default={})
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


class NoiseConfig(Section):
    """Gaussian noise on continuous actions while exploring, in shares of half the action's range."""

    scale: Annotated[float, Field(ge=0.0, le=10.0)] = 0.2


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
    noise: NoiseConfig = NoiseConfig()
    journal: bool = False
    """Write every segment's (stream, sequence, checksum) to logs/ before it is sent, for audits."""


class ParallelConfig(Section):
    """What runs at the same time as what. `--mode` sets the first two of these."""

    enabled: bool = True
    """false: one process, one thing after another, no sockets: for a debugger (`--mode sequential`)."""
    async_learning: bool = True
    """Actors and learners run freely beside each other. false: in rounds of one epoch for each environment,
    repeatable bit for bit (`--mode lockstep`)."""
    lag_rounds: Annotated[int, Field(ge=0, le=1)] = 1
    """In lockstep: how many rounds playing is ahead of training. 1: a round is played while the one before it
    is trained on; 0: they take turns."""
    parallel_actions: bool = True
    """All agents of one shape choose in one batched pass; false: one pass for each agent."""
    parallel_training: bool = True
    """Agents train at the same time; false: one at a time."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """At most so many agents train at the same time; null: all of them."""
    use_threads: bool = False
    """With enabled false: agents train in threads of the one process (as many as num_workers says)."""
    train_interval: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Batches are drawn in bursts, each time so many more epochs were played."""

    @property
    def mode(self) -> Mode:
        if not self.enabled:
            return "sequential"
        return "async" if self.async_learning else "lockstep"

    @model_validator(mode="after")
    def _means_something(self) -> ParallelConfig:
        if self.use_threads and self.enabled:
            raise ValueError(
                "use_threads: with enabled: true every learner is a process of its own, so that one's "
                "failure leaves the others running; threads of one process are for enabled: false"
            )
        if not self.parallel_training and (self.num_workers or 1) > 1:
            raise ValueError(
                f"num_workers = {self.num_workers} with parallel_training = false, which means one agent at "
                "a time; leave out one of them"
            )
        return self

    @property
    def training_at_once(self) -> int | None:
        """How many agents may train at the same time; None: all."""
        return 1 if not self.parallel_training else self.num_workers


class ReplayConfig(Section):
    """The replay service and its limiter."""

    services: Annotated[int, Field(ge=1, le=64)] = 1
    """How many replay services share the agents."""
    placement: dict[str, int] = Field(default={})
    """Which of them keeps an agent, by its id: {agent_0: 1}. They are numbered from 0; agents that are not
    named here take turns in the order of their names."""
    capacity_steps: Annotated[int, Field(ge=64)] = 131_072
    """Steps kept for each agent."""
    min_steps: Annotated[int, Field(ge=1)] = 2_000
    """No batch is drawn from fewer."""
    samples_per_insert: Annotated[float, Field(gt=0.0, le=MAX_SAMPLES_PER_INSERT)] = 8.0
    """How often a step is drawn, on average, before learners or actors have to wait."""
    tolerance: Annotated[float, Field(ge=0.0)] = 8.0
    """How far inserts and samples may run apart, in batches of the learner beyond one segment round."""
    sync_s: Positive = 30.0
    """A power cut takes at most the last sync_s seconds; a killed process takes nothing."""
    shared_memory: bool = True
    """Learners on replay's own machine get their batches through memory that both have; all others, and with
    false everybody, through the socket."""


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
    listen_on: str = ""
    """The address on which services listen; empty: the one in their endpoint. 0.0.0.0 where endpoints name
    hosts, as between containers. Beyond this machine it needs security.keys."""


class SecurityConfig(Section):
    """Who may speak with the services."""

    keys: str = ""
    """The directory of the run's keys (`rookery keys make DIR`). With keys every connection is encrypted, and
    whoever has none gets nothing in or out; empty: no keys, and services listen on this machine alone."""


class LimitsConfig(Section):
    """Bounds on what may arrive."""

    max_message_bytes: Annotated[int, Field(ge=65_536)] = 256 * 2**20
    """Larger frames end the connection before they are read."""
    send_buffer_bytes: Annotated[int, Field(ge=0, le=2**30)] = 256 * 2**10
    """What of replay's batches may wait in the system's socket buffer for one learner. Short is fast: what
    waits there long has left the caches. It bounds the rate over links with long round trips, to about
    2 * send_buffer_bytes in each round trip; 0 lets the system choose."""
