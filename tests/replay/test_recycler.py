"""Memory that is used again: never while anybody holds it, whatever holds it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from services.replay.recycler import KEPT_BLOCKS, KEPT_SIZES, Recycler

SIZE = 102_400


def test_block_unheld_is_given_again() -> None:
    """An array that nobody kept comes back, with its address."""
    recycler = Recycler()
    address = recycler.block(SIZE)[1]
    for _ in range(5):
        array, again = recycler.block(SIZE)[:2]
        assert again == address == array.ctypes.data
        del array


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[3:70:2],
        lambda array: array.view(np.float32).reshape(256, 100)[5:, ::2],
        memoryview,
        lambda array: array.data.cast("B"),
        lambda array: torch.from_numpy(array)[4],
        lambda array: {"observation": array},
        lambda array: (array, 0),
    ],
)
def test_block_while_held_in_any_way_is_another_block(hold: Callable[[Any], Any]) -> None:
    """Views, memory views, tensors and containers keep their memory; then it returns."""
    recycler = Recycler()
    array, address = recycler.block(SIZE)[:2]
    held = hold(array)
    del array
    assert recycler.block(SIZE)[1] != address
    del held
    assert recycler.block(SIZE)[1] == address


def test_block_other_size_is_another_block() -> None:
    """Pools are apart by size."""
    recycler = Recycler()
    assert recycler.block(SIZE)[0].nbytes == SIZE
    assert recycler.block(SIZE + 64)[0].nbytes == SIZE + 64
    assert len(recycler._pools) == 2


def test_block_of_many_sizes_keeps_only_the_newest_sizes() -> None:
    """Whoever asks for a new size each time gets it, and does not fill the memory with pools."""
    recycler = Recycler()
    for size in range(1, 1000):
        assert recycler.block(size)[0].nbytes == size
    assert list(recycler._pools) == list(range(1000 - KEPT_SIZES, 1000))


def test_block_more_than_kept_are_ordinary_arrays() -> None:
    """A caller who collects batches gets as many as wanted; the pool stays bounded."""
    recycler = Recycler()
    held = [recycler.block(SIZE) for _ in range(2 * KEPT_BLOCKS)]
    assert len({address for _array, address, _loan in held}) == 2 * KEPT_BLOCKS
    assert len(recycler._pools[SIZE]) == KEPT_BLOCKS


def test_array_on_its_way_through_a_socket_is_not_given_again() -> None:
    """What libzmq still has to send is held; once it has arrived the memory comes back."""
    recycler, context = Recycler(), zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    big = 1 << 22  # more than the sockets' buffers take
    try:
        array, address = recycler.block(big)[:2]
        array[:] = 7
        sender.setsockopt(zmq.IMMEDIATE, 0)
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(array.data, copy=False)
        del array
        assert recycler.block(big)[1] != address
        received = receiver.recv(copy=False)
        assert np.frombuffer(received.buffer, np.uint8).min() == 7
        for _ in range(1000):
            if recycler.block(big)[1] == address:
                break
            receiver.poll(10)  # libzmq gives the memory back from a thread of its own
        else:
            raise AssertionError("sent memory was never given back")
    finally:
        context.destroy(linger=0)
