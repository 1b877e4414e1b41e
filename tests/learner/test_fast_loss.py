"""What `learner.compile` and `learner.precision` do to an update."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from services.learner.algorithms import build_algorithm
from services.learner.algorithms.base import Algorithm
from shared.config import LearnerConfig
from shared.errors import ConfigError
from shared.specs import AgentSpec, Discrete, vector_observation

SPEC = AgentSpec(observation=vector_observation(12), discrete=Discrete(n=3))
CPU = torch.device("cpu")


def make_algorithm(**changes: Any) -> Algorithm:
    config = LearnerConfig.model_validate({"network": {"hidden": [32, 32]}} | changes)
    return build_algorithm(SPEC, config, CPU, seed=0)


def make_batch(seed: int, size: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.normal(size=(size, 1, 12)).astype(np.float32),
        "next_observation": rng.normal(size=(size, 1, 12)).astype(np.float32),
        "action": rng.integers(0, 3, size),
        "return": rng.normal(size=size).astype(np.float32),
        "discount": np.full(size, 0.9, np.float32),
        "weight": rng.random(size).astype(np.float32),
        "index": np.arange(size),
        "generation": np.ones(size, np.uint64),
        "version": np.zeros(size, np.int64),
    }


def test_bfloat16_gives_every_parameter_its_gradient_in_float32() -> None:
    """Near those of float32 and not equal to them; weights, priorities and figures stay float32."""
    exact, mixed = make_algorithm(), make_algorithm(precision="bfloat16")
    first, second = exact.gradients(make_batch(0)), mixed.gradients(make_batch(0))
    assert second.priorities.dtype == second.loss.dtype == torch.float32
    for gradient, other in zip(first.gradients, second.gradients, strict=True):
        assert other.dtype == torch.float32
        assert other.norm() > 0
        assert 0 < (gradient - other).norm() < 0.05 * gradient.norm()
    for seed in range(30):
        report = mixed.update(make_batch(seed))
        assert report is not None
        assert report.priorities.dtype == np.float32
    assert all(parameter.dtype == torch.float32 for parameter in mixed.parameters)


def test_bfloat16_learns_what_float32_learns() -> None:
    """The loss on one batch falls as far."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        algorithm = make_algorithm(precision=precision, gamma=0.5)
        batch = make_batch(0) | {"discount": np.zeros(64, np.float32)}
        reports = [algorithm.update(batch) for _ in range(150)]
        assert reports[0] is not None
        assert reports[-1] is not None
        losses[precision] = reports[-1].loss / reports[0].loss
    assert losses["float32"] < 0.1
    assert losses["bfloat16"] < 0.15


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with a C++ compiler: no g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_compiled_loss_gives_the_same_updates() -> None:
    """Also in micro-batches; the same to rounding."""
    plain, compiled = make_algorithm(micro_batches=2), make_algorithm(micro_batches=2, compile=True)
    for seed in range(3):
        first, second = plain.update(make_batch(seed)), compiled.update(make_batch(seed))
        assert first is not None
        assert second is not None
        np.testing.assert_allclose(first.priorities, second.priorities, rtol=1e-4, atol=1e-6)
    for name, tensor in plain.policy().items():
        torch.testing.assert_close(tensor, compiled.policy()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiling_without_a_compiler_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, with what to do; not at the first update with a page of tracebacks."""
    import torch._inductor.config as inductor
    from torch._inductor import cpp_builder

    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.cpp_compiler_search.cache_clear()
    with pytest.raises(ConfigError, match=r"learner\.compile = true: .*C\+\+ compiler.*install g\+\+"):
        make_algorithm(compile=True)
