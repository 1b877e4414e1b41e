"""Matrix products on the CPU: the one place that chooses who makes them.

torch's own go to MKL, which uses half of what an AMD processor can do in float32; oneDNN, which torch carries
as well, uses all of it. It is reached through an operator that torch's compiler uses. Where that is missing,
and for anything but float32 on an AMD processor, torch's own linear function is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _onednn_linear() -> Any:
    """torch.ops.mkldnn._linear_pointwise, or None where it is not."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None)


_OPERATOR = _onednn_linear() if _is_amd() else None


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]; with a gradient."""
    if _OPERATOR is None or x.dtype != torch.float32 or not x.is_cpu or _is_special():
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return found
    return _product(x, weight, bias)


def _is_special() -> bool:
    """Casting and compiling choose their products themselves."""
    return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _OPERATOR is not None
    found: Tensor = _OPERATOR(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    """y = x W^T + b, and its gradients: dx = g W, dW = g^T x, db = the sum of g's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradients[0].flatten(0, -2), x.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _product(rows, weight.t(), None).view(x.shape) if wants_x else None,
            _product(rows.t(), inputs.t(), None) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
