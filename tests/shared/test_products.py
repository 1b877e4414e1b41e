from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shared.networks import products

needs_onednn = pytest.mark.skipif(
    products._onednn_linear() is None, reason="this build of torch has no oneDNN linear operator"
)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an AMD processor, whatever this one is."""
    monkeypatch.setattr(products, "_OPERATOR", products._onednn_linear())


def tensors(*leading: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(leading))
    shapes = ((*leading, 65), (17, 65), (17,))
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)  # type: ignore[return-value]


@needs_onednn
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("leading", [(1,), (33,), (5, 12), (2, 3, 4)])
def test_product_and_its_gradients_are_those_of_torch(leading: tuple[int, ...]) -> None:
    """Only the order of additions differs."""
    mine, theirs = tensors(*leading), tensors(*leading)
    outputs = products.linear(*mine), functional.linear(*theirs)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    upstream = torch.randn(outputs[0].shape)
    found = [
        torch.autograd.grad((output * upstream).sum(), inputs)
        for output, inputs in zip(outputs, (mine, theirs), strict=True)
    ]
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_gradient_is_made_only_for_what_wants_one() -> None:
    """A first layer's inputs need none, and a frozen layer's weights neither."""
    x, weight, bias = tensors(8)
    (gradient,) = torch.autograd.grad(products.linear(x.detach(), weight, bias).sum(), [weight])
    assert gradient.shape == weight.shape
    (gradient,) = torch.autograd.grad(products.linear(x, weight.detach(), bias.detach()).sum(), [x])
    torch.testing.assert_close(gradient, weight.detach().sum(0).expand(8, -1), rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_same_numbers_give_the_same_bits_with_and_without_a_graph() -> None:
    """A policy acts as it learned: the forward pass is one and the same product."""
    x, weight, bias = tensors(40)
    with torch.no_grad():
        without = products.linear(x, weight, bias)
    assert torch.equal(products.linear(x, weight, bias), without)


@pytest.mark.usefixtures("onednn")
def test_autocast_makes_its_own_products() -> None:
    """bfloat16 is what was asked for, not float32 from somewhere else."""
    x, weight, bias = tensors(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight, bias).dtype == torch.bfloat16


def test_without_the_operator_torch_makes_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor, another build: the same function as ever."""
    monkeypatch.setattr(products, "_OPERATOR", None)
    x, weight, bias = tensors(4)
    assert torch.equal(products.linear(x, weight, bias), functional.linear(x, weight, bias))
