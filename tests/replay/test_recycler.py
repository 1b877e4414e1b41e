"""Memory that is used again: never while anybody holds it, whatever holds it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from services.replay.recycler import KEPT, Recycler

SHAPE, DTYPE = (256, 100), np.dtype(np.float32)


def test_empty_unheld_array_is_given_again() -> None:
    """An array that nobody kept comes back, with its address."""
    recycler = Recycler()
    address = recycler.empty(SHAPE, DTYPE)[1]
    for _ in range(5):
        array, again = recycler.empty(SHAPE, DTYPE)
        assert again == address == array.ctypes.data
        del array


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[3:7, ::2],
        lambda array: array.view(np.uint8).reshape(-1)[5:],
        memoryview,
        lambda array: array.data.cast("B"),
        lambda array: torch.from_numpy(array)[4],
        lambda array: {"observation": array},
        lambda array: (array, 0),
    ],
)
def test_empty_while_held_in_any_way_is_another_array(hold: Callable[[Any], Any]) -> None:
    """Views, memory views, tensors and containers keep their memory; then it returns."""
    recycler = Recycler()
    array, address = recycler.empty(SHAPE, DTYPE)
    held = hold(array)
    del array
    assert recycler.empty(SHAPE, DTYPE)[1] != address
    del held
    assert recycler.empty(SHAPE, DTYPE)[1] == address


def test_empty_other_shape_or_type_is_another_array() -> None:
    """Pools are apart by shape and by type."""
    recycler = Recycler()
    addresses = [
        recycler.empty(shape, np.dtype(dtype))[1]
        for shape, dtype in (((8, 4), "f4"), ((4, 8), "f4"), ((8, 4), "i4"))
    ]
    assert len(set(addresses)) == 3


def test_empty_more_than_kept_are_ordinary_arrays() -> None:
    """A caller who collects batches gets as many as wanted; the pool stays bounded."""
    recycler = Recycler()
    held = [recycler.empty(SHAPE, DTYPE) for _ in range(2 * KEPT)]
    assert len({address for _array, address in held}) == 2 * KEPT
    assert len(recycler._pools[SHAPE, DTYPE]) == KEPT


def test_array_on_its_way_through_a_socket_is_not_given_again() -> None:
    """What libzmq still has to send is held; once it has arrived the memory comes back."""
    recycler, context = Recycler(), zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    big = (1 << 22,)  # more than the sockets' buffers take
    try:
        array, address = recycler.empty(big, np.dtype(np.uint8))
        array[:] = 7
        sender.setsockopt(zmq.IMMEDIATE, 0)
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(array.data, copy=False)
        del array
        assert recycler.empty(big, np.dtype(np.uint8))[1] != address
        received = receiver.recv(copy=False)
        assert np.frombuffer(received.buffer, np.uint8).min() == 7
        for _ in range(1000):
            if recycler.empty(big, np.dtype(np.uint8))[1] == address:
                break
            receiver.poll(10)  # libzmq gives the memory back from a thread of its own
        else:
            raise AssertionError("sent memory was never given back")
    finally:
        context.destroy(linger=0)
