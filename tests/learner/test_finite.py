from __future__ import annotations

import pytest
import torch

from services.learner.training import finite
from shared.errors import TrainingFailed


def test_finite_tensors_of_any_type_pass_as_they_are() -> None:
    """Counters and generators' states too, empty ones, and numbers whose sum would overflow."""
    tensors = {
        "large": torch.full((3, 3), 3e38),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.tensor([1, 2]),
        "state": torch.zeros(5, dtype=torch.uint8),
        "none": torch.zeros(0),
    }
    assert finite(tensors) is tensors


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_with_one_value_that_is_not_finite_are_refused_by_name(
    value: float, dtype: torch.dtype
) -> None:
    """One number among many is enough."""
    spoilt = torch.ones(50, 50, dtype=dtype)
    spoilt[31, 7] = value
    with pytest.raises(TrainingFailed, match=r"not finite in 1 of 2 tensors \(head\.weight\)"):
        finite({"head.bias": torch.ones(3), "head.weight": spoilt})
