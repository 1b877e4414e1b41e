"""What an update leaves to be read, on its way to the host: there at once on a CPU, a moment later on a GPU.

Asking a GPU for a number makes the host wait for everything before it, and the GPU then for the host. So the
numbers of an update travel into pinned memory behind it, and are read while the next update runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Outcome:
    """New priorities and a few numbers of one update."""

    def __init__(self, priorities: Tensor, numbers: Sequence[Tensor]) -> None:
        self._priorities = _begin_to_host(priorities)
        self._numbers = _begin_to_host(torch.stack(list(numbers)))
        self._copied: torch.cuda.Event | None = None
        if priorities.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(priorities.device))

    @property
    def arrived(self) -> bool:
        """Whether reading would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> tuple[npt.NDArray[np.float32], list[float]]:
        """Priorities and numbers, once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._priorities.numpy(), self._numbers.tolist()


def _begin_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
