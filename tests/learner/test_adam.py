"""Our Adam is torch's, without what is wrapped around it."""

import torch

from services.learner.adam import Adam


def make_parameters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(7, 5, generator=generator, requires_grad=True),
        "bias": torch.randn(7, generator=generator, requires_grad=True),
    }


def random_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(7, 5, generator=generator), torch.randn(7, generator=generator)]


def test_adam_steps_equal_torch_bit_for_bit():
    """Twenty steps move the same parameters to the same bits as torch.optim.Adam(fused=True)."""
    ours, theirs = make_parameters(0), make_parameters(0)
    adam = Adam(ours, lr=1e-2, epsilon=1e-5)
    reference = torch.optim.Adam(list(theirs.values()), lr=1e-2, eps=1e-5, fused=True)
    for step in range(20):
        adam.step(random_gradients(step))
        for parameter, gradient in zip(theirs.values(), random_gradients(step), strict=True):
            parameter.grad = gradient
        reference.step()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name])


def test_adam_restored_state_continues_bit_for_bit():
    """A copy that takes over state and parameters after five steps goes on like the original."""
    first, second = make_parameters(0), make_parameters(1)
    adam, copy = Adam(first, lr=1e-2, epsilon=1e-5), Adam(second, lr=1e-2, epsilon=1e-5)
    for step in range(5):
        adam.step(random_gradients(step))
    with torch.no_grad():
        for name, tensor in second.items():
            tensor.copy_(first[name])
    copy.load(adam.state())
    for step in range(5, 10):
        adam.step(random_gradients(step))
        copy.step(random_gradients(step))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
