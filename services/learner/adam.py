"""Adam (Kingma & Ba 2015) as one call of torch's fused kernel on lists of tensors.

torch.optim.Adam makes the same call, to the bit, wrapped in hooks that a small network feels in every update;
and the first of them imports torch's compiler, which takes seconds of every learner's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Adam:
    """The moments of some parameters, and the step that uses them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        lr: float,
        epsilon: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.lr, self.epsilon, self.betas = lr, epsilon, betas
        self._names = list(parameters)
        self._parameters = [parameter.detach() for parameter in parameters.values()]
        self._means = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._squares = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._steps = [torch.zeros((), device=parameter.device) for parameter in self._parameters]

    def step(self, gradients: Sequence[Tensor], stop: Tensor | None = None) -> None:
        """Moves the parameters in place, one gradient for each in their order.

        `stop`: a scalar on the device; where it is 1.0 nothing is changed, and nobody had to look at it.
        """
        torch._foreach_add_(self._steps, 1.0)
        torch._fused_adam_(
            self._parameters,
            list(gradients),
            self._means,
            self._squares,
            [],
            self._steps,
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=0.0,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=stop,
        )
        if stop is not None:
            torch._foreach_sub_(self._steps, [stop] * len(self._steps))
        # The fused kernel does not tell autograd that it wrote. Told, a backward through the old weights
        # raises instead of being silently wrong.
        torch.autograd.graph.increment_version(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name."""
        parts = {"mean": self._means, "square": self._squares, "step": self._steps}
        return {
            f"{part}/{name}": tensor
            for part, tensors in parts.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; KeyError or RuntimeError if it is of other parameters."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
