"""Other libraries' prioritized replay buffers, each doing the same work through its own public calls.

A cycle draws a batch (observation, action, reward, next observation, end flag, weights, indices) and writes
new priorities for its rows. Each library is used in its fastest form for that: with next observations stored
beside the observations, which costs them twice our memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

ALPHA, BETA, EPSILON = 0.6, 0.4, 1e-3
CHUNK = 4096

Array = np.ndarray[Any, Any]


class Peer(Protocol):
    """A filled buffer."""

    def cycle(self, batch_size: int, priorities: Array) -> None:
        """Draws a batch and updates its priorities."""

    def uniform(self, batch_size: int) -> None:
        """Draws a batch from the library's buffer without priorities."""


class Cpprb:
    """cpprb: a C++ ring and segment trees."""

    def __init__(self, observations: Array) -> None:
        import cpprb  # noqa: PLC0415 - a peer is only imported when it is measured

        columns = {
            "obs": {"shape": observations.shape[1:], "dtype": observations.dtype},
            "next_obs": {"shape": observations.shape[1:], "dtype": observations.dtype},
            "act": {"dtype": np.int64},
            "rew": {"dtype": np.float32},
            "done": {"dtype": np.bool_},
        }
        size = len(observations)
        self._buffer = cpprb.PrioritizedReplayBuffer(size, columns, alpha=ALPHA, eps=EPSILON)
        self._plain = cpprb.ReplayBuffer(size, columns)
        for start in range(0, size, CHUNK):
            rows = observations[start : start + CHUNK]
            count = len(rows)
            following = observations[np.arange(start + 1, start + count + 1) % size]
            for buffer in (self._buffer, self._plain):
                buffer.add(
                    obs=rows,
                    next_obs=following,
                    act=np.arange(count) % 4,
                    rew=np.ones(count, np.float32),
                    done=np.zeros(count, bool),
                )
        spread(self._buffer.update_priorities, size)

    def cycle(self, batch_size: int, priorities: Array) -> None:
        batch = self._buffer.sample(batch_size, BETA)
        self._buffer.update_priorities(batch["indexes"], priorities)

    def uniform(self, batch_size: int) -> None:
        self._plain.sample(batch_size)


class Tianshou:
    """tianshou: numpy columns and a segment tree compiled by numba."""

    def __init__(self, observations: Array) -> None:
        from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer  # noqa: PLC0415

        size = len(observations)
        columns = Batch(
            obs=observations,
            act=np.arange(size) % 4,
            rew=np.ones(size, np.float32),
            terminated=np.zeros(size, bool),
            truncated=np.zeros(size, bool),
            done=np.zeros(size, bool),
            obs_next=np.roll(observations, -1, axis=0),
            info=Batch(),
        )
        self._buffer = PrioritizedReplayBuffer(size, alpha=ALPHA, beta=BETA)
        self._plain = ReplayBuffer(size)
        for buffer in (self._buffer, self._plain):
            # Adding a million steps one by one takes half a minute; this is how from_data fills a buffer.
            buffer.set_batch(columns)
            buffer._size = size
        spread(self._buffer.update_weight, size)

    def cycle(self, batch_size: int, priorities: Array) -> None:
        _batch, index = self._buffer.sample(batch_size)
        self._buffer.update_weight(index, priorities)

    def uniform(self, batch_size: int) -> None:
        self._plain.sample(batch_size)


def spread(update: Callable[[Array, Array], object], size: int) -> None:
    """Gives every row a priority of its own."""
    rng = np.random.default_rng(0)
    for start in range(0, size, CHUNK):
        index = np.arange(start, min(size, start + CHUNK))
        update(index, rng.exponential(size=len(index)) + EPSILON)


PEERS: dict[str, Callable[[Array], Peer]] = {"cpprb": Cpprb, "tianshou": Tianshou}
LEFT_OUT = "torchrl is left out: its wheel does not load its C++ segment tree beside torch 2.13"
