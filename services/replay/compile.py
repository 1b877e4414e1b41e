"""`python -m services.replay.compile`: compiles replay's kernels ahead of time, a few seconds once.

It makes a small buffer and does with it everything that a run does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from services.replay.buffer import AgentBuffer
from shared.codec import pack_segment, segment_checksum
from shared.messages import Segment
from shared.segment_frame import frame_of, read_frame
from shared.specs import AgentSpec, Discrete, DType, vector_observation


def compile_kernels() -> None:
    """Compiles every kernel for the types that replay uses."""
    spec = AgentSpec(observation=vector_observation(3, DType.UINT8), discrete=Discrete(n=2))
    with tempfile.TemporaryDirectory() as directory:
        _use(_small_buffer(Path(directory), spec))


def _small_buffer(directory: Path, spec: AgentSpec) -> AgentBuffer:
    return AgentBuffer(
        directory,
        "agent",
        spec,
        capacity_steps=8,
        segment_steps=2,
        n_step=1,
        gamma=0.9,
        alpha=0.6,
        priority_epsilon=1e-3,
        min_steps=1,
        samples_per_insert=1.0,
        tolerance_samples=1.0,
        seed=0,
    )


def _use(buffer: AgentBuffer) -> None:
    arrays = {
        column.name: np.zeros((3 if column.per == "observation" else 2, *column.shape), column.dtype.numpy)
        for column in buffer.spec.columns
    }
    segment = Segment(
        incarnation="0" * 32,
        agent="agent",
        sequence=1,
        produced_steps=2,
        actor_index=0,
        slot=0,
        epoch=0,
        before=0,
        owned=2,
        rows=3,
        checksum=segment_checksum(pack_segment(buffer.spec, arrays)),
    )
    frame = frame_of(segment, pack_segment(buffer.spec, arrays))
    buffer.insert(*read_frame(frame.data))
    buffer.ring.slot_arrays(0)
    batch = buffer.draw(0, 2, 0.5)
    buffer.update_priorities(batch["index"], batch["generation"], np.ones(2, np.float32))


if __name__ == "__main__":
    compile_kernels()
