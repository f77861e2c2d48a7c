"""What the estimates of a divergence estimate, by summing over every token that could be drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl.losses.kl import k1, k2, k3


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    now, reference = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    return now.requires_grad_(), reference


def divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of two vectors of logits."""
    return (left.softmax(0) * (left.log_softmax(0) - right.log_softmax(0))).sum()


def mean_value_and_gradient(logits: tuple[Tensor, Tensor], estimate: object) -> tuple[float, Tensor]:
    """Of the estimate under draws from the present policy, the draws held constant as in training."""
    now, reference = logits
    assert callable(estimate)
    each = estimate(now.log_softmax(0), reference.log_softmax(0))
    mean = (now.softmax(0).detach() * each).sum()
    return mean.item(), torch.autograd.grad(mean, now)[0]


def test_k1_has_the_value_and_no_gradient(logits: tuple[Tensor, Tensor]) -> None:
    value, gradient = mean_value_and_gradient(logits, k1)
    assert value == pytest.approx(divergence(*logits).item())
    assert gradient.abs().max() < 1e-12


def test_k2_has_the_gradient_and_not_the_value(logits: tuple[Tensor, Tensor]) -> None:
    value, gradient = mean_value_and_gradient(logits, k2)
    true = divergence(*logits)
    assert value != pytest.approx(true.item(), rel=0.01)
    assert torch.allclose(gradient, torch.autograd.grad(true, logits[0])[0])


def test_k3_has_the_value_and_the_gradient_of_the_other_direction(logits: tuple[Tensor, Tensor]) -> None:
    now, reference = logits
    value, gradient = mean_value_and_gradient(logits, k3)
    assert value == pytest.approx(divergence(now, reference).item())
    assert torch.allclose(gradient, torch.autograd.grad(divergence(reference, now), now)[0])
    assert not torch.allclose(gradient, torch.autograd.grad(divergence(now, reference), now)[0], rtol=0.01)
    assert (k3(now.log_softmax(0), reference.log_softmax(0)) >= 0).all()


@pytest.mark.parametrize("estimate", [k1, k2, k3])
def test_equal_policies_diverge_by_nothing_and_far_ones_by_something_finite(estimate: object) -> None:
    assert callable(estimate)
    same = torch.tensor([-1.0, -50.0])
    assert estimate(same, same).tolist() == [0.0, 0.0]
    far = estimate(torch.tensor([-1.0, -1e4, -1.0]), torch.tensor([-1e4, -1.0, -torch.inf]))
    assert torch.isfinite(far).all()
