"""One agent's buffer as the config wants it: the same for the replay service and for sequential mode."""

from __future__ import annotations

from pathlib import Path

from services.replay.buffer import AgentBuffer
from services.replay.rounds import RoundBuffer
from shared.config import Config
from shared.layout import MAX_BYTES
from shared.specs import AgentSpec


def open_buffer(directory: Path, agent: str, spec: AgentSpec, config: Config) -> AgentBuffer:
    """Opens the agent's files, or makes them."""
    replay, learner = config.replay, config.learner_for(agent)
    buffer = AgentBuffer(
        directory,
        agent,
        spec,
        capacity_steps=replay.capacity_steps,
        segment_steps=config.segment_steps,
        n_step=learner.n_step,
        gamma=learner.gamma,
        alpha=learner.priority.alpha,
        priority_epsilon=learner.priority.epsilon,
        min_steps=replay.min_steps,
        samples_per_insert=replay.samples_per_insert,
        tolerance_samples=tolerance_samples(config, agent, replay.samples_per_insert),
        seed=config.seed,
        interval_steps=_interval_steps(config),
        max_batch_bytes=min(config.limits.max_message_bytes, MAX_BYTES),
    )
    ratio = buffer.limiter.samples_per_insert  # may have been changed in an earlier life
    buffer.adjust_limiter(tolerance_samples=tolerance_samples(config, agent, ratio))
    return buffer


def in_rounds(buffer: AgentBuffer, config: Config) -> RoundBuffer:
    """The buffer under the schedule of lockstep and sequential mode."""
    learner = config.learner_for(buffer.agent)
    return RoundBuffer(
        buffer, actors=config.actor.count, batch_size=learner.batch_size, prefetch=learner.prefetch
    )


def tolerance_samples(config: Config, agent: str, samples_per_insert: float) -> float:
    """How far inserts and samples may run apart."""
    # All slots' epochs end together, and an interval is played before anything of it is drawn.
    burst_steps = config.actor.envs * config.segment_steps + _interval_steps(config)
    batches = config.replay.tolerance * config.learner_for(agent).batch_size
    return batches + burst_steps * samples_per_insert


def _interval_steps(config: Config) -> int:
    """One agent's steps in `train_interval` epochs; with 1, batches flow as soon as they are paid for."""
    interval = config.parallel.train_interval
    return interval * config.world.max_turns if interval > 1 else 1
