"""The learner's section of the config: how one agent learns, each key with its meaning and its bounds."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shared.config.sections import Fraction, Positive, Section

ALGORITHMS = ("dqn", "iqn", "hybrid")  # found by shared/algorithms.py
WITHOUT_LEARNER = ("random", "scripted")


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
    noisy: bool = False
    """Noisy layers after the body (Fortunato 2018): the network learns how much to explore. actor.epsilon
    explores beside it; set its `start` and `base` to 0 to leave exploring to the noise."""
    noisy_sigma: Positive = 0.5
    """Their noise at the start, over the square root of the layer's inputs."""
    cosines: Annotated[int, Field(ge=1, le=4096)] = 64
    """iqn: how many cosines a quantile is embedded in."""
    act_quantiles: Annotated[int, Field(ge=1, le=1024)] = 32
    """iqn: actions are chosen by the mean over so many quantiles."""


class IQNConfig(Section):
    """Implicit quantile networks (Dabney 2018)."""

    quantiles: Annotated[int, Field(ge=1, le=512)] = 12
    """N: sampled for the online network at each update."""
    target_quantiles: Annotated[int, Field(ge=1, le=512)] = 12
    """N': sampled for the target."""
    kappa: Positive = 1.0
    """Where the quantile Huber loss becomes linear."""


class HybridConfig(Section):
    """A discrete and a continuous action at once."""

    continuous: Literal["imitate", "improve"] = "improve"
    """imitate: the continuous head is drawn to what was executed (MSE). improve: it climbs a critic that
    takes it as input."""
    weight: Positive = 1.0
    """Of the continuous head's loss beside the discrete one's. It matters less to improve, whose two parts
    share no weights."""


class LearnerConfig(Section):
    """How one agent learns. `agents: {agent_1: {...}}` overrides any of it for one agent."""

    algorithm: str = "dqn"
    """dqn, iqn or hybrid; random or scripted agents learn nothing; or your own as "package.module:Class"."""
    script: str = ""
    """scripted: what the agent does, as "package.module:factory"; empty: what the world offers."""
    options: dict[str, Any] = Field(default={})
    """For an algorithm of your own: whatever it wants to know."""
    iqn: IQNConfig = IQNConfig()
    hybrid: HybridConfig = HybridConfig()
    network: NetworkConfig = NetworkConfig()
    double: bool = True
    n_step: Annotated[int, Field(ge=1, le=64)] = 3
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 256
    micro_batches: Annotated[int, Field(ge=1, le=1024)] = 1
    """A batch is trained on in so many parts, one step for all: the same gradient, less memory."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Gradient workers: threads that each work on a batch of their own, at the same time."""
    lr: Positive = 1e-3
    adam_epsilon: Positive = 1e-5
    reward_scale: Positive = 0.1
    """Rewards are multiplied by this before they become targets."""
    clip_norm: Positive = 10.0
    """Gradients are scaled down to this norm."""
    priority: PriorityConfig = PriorityConfig()
    target: TargetConfig = TargetConfig()
    prefetch: Annotated[int, Field(ge=1, le=64)] = 8
    """Batches that are asked for ahead, half of them at a time; so how many updates old the priorities may
    be that rows are drawn by."""
    publish_updates: Annotated[int, Field(ge=1)] = 50
    """A new version after this many updates,"""
    publish_s: Positive = 1.0
    """or after this many seconds with at least one update."""
    checkpoint_s: Positive = 10.0
    """The parameter server gets a checkpoint this often; a lost learner repeats at most this much."""
    update_deadline_s: Positive = 60.0
    """A learner that is stuck for so long ends, and starts again from its checkpoint."""
    max_skipped: Annotated[int, Field(ge=1)] = 100
    """After so many updates in a row whose loss is not finite the learner ends, and starts again likewise."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """torch's threads for each worker."""
    compile: bool = False
    """Let torch compile the loss: slower to start, faster on a GPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: forward and backward passes in mixed precision."""
    device: str = "auto"
    """auto takes a GPU if there is one, agents taking turns; or cpu, cuda:0, ..."""

    @field_validator("algorithm")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = (*ALGORITHMS, *WITHOUT_LEARNER)
        if name in known or all(name.partition(":")):
            return name
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"no built-in algorithm is called {name!r}; {hint}Known are {', '.join(known)}; one of your own "
            'is written "package.module:Class"'
        )

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn: random and scripted agents have no learner and no buffer."""
        return self.algorithm not in WITHOUT_LEARNER
