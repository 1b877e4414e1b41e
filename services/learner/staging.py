"""Batches on their way to the device.

On a CPU a batch's tensors are views on what was received: nothing is copied. On a GPU the received block is
copied once into pinned memory and from there, as one transfer on a stream of its own, to the device, while
the update before it runs; its tensors are views on the block there.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from services.learner.training import Tensors
from shared.layout import Arrays, Layout, pack

# What replay wants back with the priorities; no loss has a use for them.
REPLAY_ONLY = frozenset({"index", "generation"})


class Staging(Protocol):
    """The way to one device."""

    def to_device(self, arrays: Arrays) -> Tensors:
        """The batch as tensors there."""
        ...


def open_staging(device: torch.device, buffers: int) -> Staging:
    """The way to this device; on a GPU with as many pinned buffers as batches may be on it."""
    return PinnedStaging(device, buffers) if device.type == "cuda" else NoStaging(device)


class NoStaging:
    """Where the host's memory is the device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, arrays: Arrays) -> Tensors:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name not in REPLAY_ONLY}
        if self._device.type == "cpu":
            return tensors
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


class PinnedStaging:
    """Pinned buffers in turn, and a stream that copies from them."""

    def __init__(self, device: torch.device, buffers: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [_PinnedBuffer() for _ in range(buffers)]
        self._next = 0
        self._taking = threading.Lock()  # several workers may stage at the same time

    def to_device(self, arrays: Arrays) -> Tensors:
        """The batch on the device. The current stream waits for the copy; the host does not."""
        packed = pack(arrays)
        with self._taking:
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % len(self._buffers)
            host = buffer.take(packed.layout.nbytes)
            host.copy_(torch.from_numpy(packed.block))
            with torch.cuda.stream(self._stream):
                block = host.to(self._device, non_blocking=True)
            buffer.copied.record(self._stream)
        using = torch.cuda.current_stream(self._device)
        using.wait_event(buffer.copied)
        block.record_stream(using)  # so that its memory is not given away before the update has used it
        return views(block, packed.layout)


class _PinnedBuffer:
    """Page-locked memory, and the end of the last copy from it."""

    def __init__(self) -> None:
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """Room for so many bytes, once the copy before has left it."""
        self.copied.synchronize()
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory[:nbytes]


def views(block: Tensor, layout: Layout) -> Tensors:
    """The arrays of a received block as tensors that share its memory, wherever it lies."""
    return {
        place.name: block[place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.dtype.name))
        .view(place.shape)
        for place in layout.places.values()
        if place.name not in REPLAY_ONLY
    }
