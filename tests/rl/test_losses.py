"""Each loss against a float64 loop over the paper's formula, in value and in gradient."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl.config import TrainerConfig
from rl.losses.recipes import RECIPES, LossName, Objective, Totals
from rl.losses.tokens import PassTokens
from rl.losses.total import POLICY_TERMS, LossSums, policy_loss
from tests.rl.loss_reference import LOSSES, Row, reference_loss

NAMES = list(RECIPES)
MISSING = (math.nan, -math.inf, math.inf)
EXTREME = (100.0, -100.0, 25.0, -25.0, 0.0)


def objective_of(name: LossName, **values: Any) -> Objective:
    return TrainerConfig(loss=name, **values).objective


def tokens_of(
    rows: Sequence[Row], dtype: torch.dtype = torch.float64, *, proximal: bool = True
) -> PassTokens:
    def flat(values: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for part in values for value in part], dtype=dtype)

    return PassTokens(
        logprobs=flat([row.now for row in rows]).requires_grad_(),
        sampler_logprobs=flat([row.sampler for row in rows]),
        advantages=flat([[row.advantage] * len(row.now) for row in rows]),
        samples=torch.tensor([i for i, row in enumerate(rows) for _ in row.now], dtype=torch.int64),
        sample_count=len(rows),
        reference_logprobs=flat([row.reference for row in rows]),
        proximal_logprobs=flat([row.proximal for row in rows]) if proximal else None,
    )


def totals_of(rows: Sequence[Row]) -> Totals:
    return Totals(max(sum(len(row.now) for row in rows), 1), len(rows))


def computed(rows: Sequence[Row], objective: Objective) -> tuple[LossSums, Tensor]:
    inputs = tokens_of(rows)
    sums = policy_loss(inputs, objective, totals_of(rows))
    (gradient,) = torch.autograd.grad(sums.loss, inputs.logprobs)
    return sums, gradient


def expected(rows: Sequence[Row], objective: Objective) -> tuple[float, Tensor]:
    leaves = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in row.now] for row in rows]
    loss = reference_loss(rows, leaves, [row.now for row in rows], objective)
    flat = [leaf for part in leaves for leaf in part]
    if not loss.requires_grad:
        return loss.item(), torch.zeros(len(flat), dtype=torch.float64)
    found = torch.autograd.grad(loss, flat, allow_unused=True)
    return loss.item(), torch.stack([torch.zeros(()).double() if g is None else g for g in found])


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Samples of no, one or some tokens; ratios from nothing to e^100; tokens that must be left out."""
    gap = st.one_of(st.floats(-3, 3), st.sampled_from(EXTREME))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        row = Row([], [], [], [], draw(st.floats(-3, 3)))
        for _ in range(draw(st.integers(0, 5))):
            now = draw(st.floats(-30, 0))
            missing = draw(st.booleans()) and draw(st.booleans())
            row.now.append(draw(st.sampled_from((now, -math.inf, math.nan))) if missing else now)
            row.sampler.append(draw(st.sampled_from(MISSING)) if missing else now - draw(gap))
            row.reference.append(draw(st.sampled_from(MISSING)) if missing else now - draw(gap))
            row.proximal.append(draw(st.sampled_from(MISSING)) if missing else now - draw(gap))
        found.append(row)
    return found


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(rows=rows(), coefficient=st.sampled_from((0.0, 0.3)), estimator=st.sampled_from(("k2", "k3")))
def test_value_and_gradient_are_those_of_the_formula(
    name: LossName, rows: list[Row], coefficient: float, estimator: str
) -> None:
    objective = objective_of(name, kl_coefficient=coefficient, kl_estimator=estimator)
    if not any(row.now for row in rows):
        rows[0].now.append(-1.0)
        for values in (rows[0].sampler, rows[0].reference, rows[0].proximal):
            values.append(math.nan)
    sums, gradient = computed(rows, objective)
    value, slope = expected(rows, objective)
    assert sums.loss.item() == pytest.approx(value, rel=1e-9, abs=1e-10)
    assert torch.isfinite(gradient).all()
    assert torch.allclose(gradient, slope, rtol=1e-9, atol=1e-10)
    usable = sum(math.isfinite(value) for row in rows for value in row.sampler)
    assert (sums.token_count, sums.masked_count) == (usable, len(gradient) - usable)
    assert math.isfinite(sums.ratio_sum + sums.kl_sum + sums.entropy_sum + sums.reference_kl_sum)


def random_rows(seed: int, samples: int = 3, spread: float = 0.4) -> list[Row]:
    rng = random.Random(seed)
    found = []
    for index in range(samples):
        now = [rng.uniform(-5, 0) for _ in range(1 + index * 2)]
        sampler, reference, proximal = ([value + rng.gauss(0, spread) for value in now] for _ in range(3))
        found.append(Row(now, sampler, reference, proximal, rng.gauss(0, 1)))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_finite_differences(name: LossName, seed: int) -> None:
    """Of the formula with all that stops the gradient held still."""
    objective = objective_of(name, kl_coefficient=0.3)
    rows = random_rows(seed)
    _, gradient = computed(rows, objective)
    step = 1e-6
    slopes = []
    for place, row in enumerate(rows):
        for token in range(len(row.now)):
            ends = []
            for sign in (1, -1):
                moved = [[torch.tensor(v, dtype=torch.float64) for v in each.now] for each in rows]
                moved[place][token] += sign * step
                ends.append(reference_loss(rows, moved, [each.now for each in rows], objective).item())
            slopes.append((ends[0] - ends[1]) / (2 * step))
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


def test_every_name_has_a_function_and_a_reference() -> None:
    assert set(get_args(LossName)) == set(RECIPES) == set(POLICY_TERMS) == set(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_near_float64(name: LossName) -> None:
    rows = random_rows(5)
    objective = objective_of(name)
    exact = policy_loss(tokens_of(rows), objective, totals_of(rows))
    rounded = policy_loss(tokens_of(rows, torch.float32), objective, totals_of(rows))
    assert rounded.loss.dtype == torch.float32
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_gap_of_any_size_stays_finite_in_float32(name: LossName, advantage: float, gap: float) -> None:
    now = [-1.0, -2.0]
    far = [value - gap for value in now]
    inputs = tokens_of([Row(now, far, far, far, advantage)], torch.float32, proximal=False)
    sums = policy_loss(inputs, objective_of(name, kl_coefficient=0.1), Totals(2, 1))
    (gradient,) = torch.autograd.grad(sums.loss, inputs.logprobs)
    assert torch.isfinite(sums.loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_passes_of_whole_samples_add_up_to_the_batch(name: LossName) -> None:
    rows = random_rows(7, samples=4)
    objective = objective_of(name, kl_coefficient=0.2)
    whole, _ = computed(rows, objective)
    parts = [policy_loss(tokens_of(part), objective, totals_of(rows)) for part in (rows[:1], rows[1:])]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_without_tokens_costs_nothing(name: LossName) -> None:
    rows = [Row([], [], [], [], 1.0)]
    sums = policy_loss(tokens_of(rows), objective_of(name, kl_coefficient=0.1), Totals(5, 2))
    assert (sums.loss.item(), sums.token_count, sums.masked_count) == (0.0, 0, 0)


def loss_of_before(logprobs: Tensor, sampler: Tensor, advantages: Tensor, cap: float, total: int) -> Tensor:
    """What the trainer computed when it knew one loss, operation by operation."""
    usable = torch.isfinite(sampler)
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(usable, logprobs.detach() - sampler, zero)
    weight = torch.exp(log_ratio.clamp(max=math.log(cap)))
    return torch.where(usable, -weight * advantages * logprobs, zero).sum() / total


def test_the_default_loss_is_what_it_was_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(997, generator=generator) * 6
    sampler = logprobs + torch.randn(997, generator=generator)
    sampler[::13] = math.nan
    advantages = torch.randn(997, generator=generator)
    samples = torch.arange(997) // 50
    before, after = (logprobs.clone().requires_grad_() for _ in range(2))
    old = loss_of_before(before, sampler, advantages, 2.0, 1000)
    objective = TrainerConfig().objective
    assert objective == Objective()
    inputs = PassTokens(after, sampler, advantages, samples, 20)
    new = policy_loss(inputs, objective, Totals(1000, 20)).loss
    assert torch.equal(old, new)
    (old_gradient,), (new_gradient,) = torch.autograd.grad(old, before), torch.autograd.grad(new, after)
    assert torch.equal(old_gradient, new_gradient)


def test_decoupled_ppo_at_its_first_update_has_the_gradient_of_tis() -> None:
    rows = random_rows(11, spread=1.5)
    gradients = []
    for name in ("decoupled_ppo", "tis"):
        inputs = tokens_of(rows, proximal=False)
        sums = policy_loss(inputs, objective_of(name), totals_of(rows))
        gradients.append(torch.autograd.grad(sums.loss, inputs.logprobs)[0])
    first, second = gradients
    assert torch.allclose(first, second, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "gaps", "advantage", "clipped"),
    [
        ("tis", [1.0, 0.0, -1.0], 1.0, 1),
        ("mis", [1.0, 0.0, -1.0], 1.0, 2),
        ("sequence_mis", [1.0, 0.0, -0.9], 1.0, 0),
        ("sequence_mis", [1.0, 0.0, 0.0], 1.0, 3),
        ("grpo", [1.0, 0.0, -1.0], 1.0, 1),
        ("grpo", [1.0, 1.0, -1.0], -1.0, 1),
        ("dapo", [math.log(1.25), 0.3, 0.0], 1.0, 1),
        ("gspo", [0.0, 0.0, 0.01], 1.0, 3),
        ("cispo", [2.0, 0.0, -9.0], 1.0, 1),
    ],
)
def test_clipped_tokens_are_counted(
    name: LossName, gaps: list[float], advantage: float, clipped: int
) -> None:
    now = [-1.0] * 3
    row = Row(now, [-1.0 - gap for gap in gaps], now, now, advantage)
    sums = policy_loss(tokens_of([row], proximal=False), objective_of(name), Totals(3, 1))
    assert sums.clipped_count == clipped


def test_a_divergence_without_reference_is_refused() -> None:
    inputs = PassTokens(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1).long(), 1)
    with pytest.raises(ValueError, match=r"kl_coefficient 0\.1 needs reference"):
        policy_loss(inputs, objective_of("grpo", kl_coefficient=0.1), Totals(1, 1))
