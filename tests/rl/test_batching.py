"""Packed groups must train exactly as unpacked samples do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from rl.batching import pack_group, pack_pass, plan_passes, sample_from_turns
from rl.config import TrainerConfig
from rl.losses.recipes import Totals
from rl.prefix_tree import common_prefix, merge
from rl.trainer import TorchTrainer
from rl.types import (
    Batch,
    Episode,
    Group,
    Outcome,
    PackedGroup,
    Sample,
    Scored,
    StopReason,
    Task,
    Turn,
    Unscored,
    VersionSpan,
)

VOCABULARY = 97


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def turn(sampled: list[int], observation: list[int]) -> Turn:
    count = len(sampled)
    spans = (VersionSpan(0, 0, count),)
    return Turn(ids(*sampled), np.full(count, -0.5, np.float32), spans, ids(*observation))


def episode(outcome: Outcome, *turns: Turn) -> Episode:
    return Episode(Task("k", "sums", 0, "q", "a"), turns, outcome, StopReason.COMPLETED)


def random_group(seed: int, trunk: np.ndarray, rest: int = 8) -> PackedGroup:
    """Up to `rest` tokens of prompt behind the trunk, then four samples of which some begin alike."""
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([trunk, rng.integers(0, VOCABULARY, rng.integers(rest // 2, rest + 1))])
    beginnings = [rng.integers(0, VOCABULARY, 4) for _ in range(2)]
    samples = []
    for index in range(4):
        own = rng.integers(0, VOCABULARY, rng.integers(1, 12))
        row = np.concatenate([beginnings[index % 2][: 2 + index], own]).astype(np.int32)
        mask = rng.random(len(row)) < 0.7
        mask[-1] = True
        logprobs = np.where(mask, rng.normal(-4.5, 0.3, len(row)), np.nan).astype(np.float32)
        samples.append(Sample(row, mask, logprobs, float(rng.normal())))
    return PackedGroup(f"task-{seed}", prompt.astype(np.int32), tuple(samples))


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def unpacked_loss(model: LlamaForCausalLM, groups: list[PackedGroup], cap: float) -> torch.Tensor:
    """The same loss the long way: every sample behind its own prompt, one forward each, causal mask."""
    terms = []
    for group in groups:
        for sample in group.samples:
            row = torch.from_numpy(np.concatenate([group.prompt_ids, sample.ids])).long()
            logits = model(input_ids=row[None]).logits[0, len(group.prompt_ids) - 1 : -1]
            logprobs = functional.log_softmax(logits, -1).gather(1, row[len(group.prompt_ids) :, None])[:, 0]
            chosen = torch.from_numpy(sample.loss_mask)
            now, then = logprobs[chosen], torch.from_numpy(sample.logprobs)[chosen]
            weight = torch.exp(now.detach() - then).clamp(max=cap)
            terms.append(-(weight * sample.advantage * now).sum())
    return torch.stack(terms).sum() / sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)


@pytest.mark.parametrize(
    ("trunk_length", "rest", "max_pass_tokens"),
    [
        pytest.param(11, 8, 1, id="one group a pass"),
        pytest.param(11, 8, 10_000, id="all under one mask"),
        pytest.param(600, 8, 10_000, id="trunk apart from its groups"),
        pytest.param(600, 1100, 10_000, id="prompts apart from their samples"),
        pytest.param(0, 8, 10_000, id="nothing shared"),
    ],
)
def test_packed_loss_and_gradients_equal_unpacked(trunk_length: int, rest: int, max_pass_tokens: int) -> None:
    trunk = np.arange(trunk_length, dtype=np.int32) % VOCABULARY
    groups = [random_group(seed, trunk, rest) for seed in range(3)]
    reference = tiny_llama()
    loss = unpacked_loss(reference, groups, cap=1.2)
    loss.backward()
    model = tiny_llama()
    trainer = TorchTrainer(model, TrainerConfig(ratio_cap=1.2))
    batch = Batch(1, tuple(groups))
    passes = list(plan_passes(groups, max_pass_tokens))
    totals = Totals(batch.trained_count, batch.sample_count)
    sums = [trainer.accumulate(packed, totals) for packed in passes]
    assert len(passes) == (3 if max_pass_tokens == 1 else 1)
    assert sum(part["loss"] for part in sums) == pytest.approx(loss.item(), abs=1e-5)
    for (name, expected), (_, got) in zip(
        reference.named_parameters(), model.named_parameters(), strict=True
    ):
        assert expected.grad is not None
        assert got.grad is not None
        assert torch.allclose(got.grad, expected.grad, atol=1e-5, rtol=1e-4), name
    assert float(model.get_input_embeddings().weight.grad.norm()) > 1e-3


def test_every_token_is_computed_once() -> None:
    groups = [random_group(seed, np.arange(20, dtype=np.int32)) for seed in range(3)]
    packed = pack_pass(groups)
    rows = [tuple(g.prompt_ids) + tuple(s.ids) for g in groups for s in g.samples]
    assert len(packed.ids) == len({row[:end] for row in rows for end in range(1, len(row) + 1)})
    assert len(packed.positions) == packed.segments[-1].end == len(packed.ids)
    assert len(packed.targets) == len(set(packed.rows.tolist())) <= len(packed.rows)


def test_paths_lead_through_the_tree() -> None:
    rows = [ids(5, 6, 7), ids(5, 6, 8, 9), ids(5, 6, 8), ids(4), ids(5, 6, 7)]
    tree = merge(rows)
    assert [tree.ids[path].tolist() for path in tree.paths] == [row.tolist() for row in rows]
    assert [tree.positions[path].tolist() for path in tree.paths] == [list(range(len(row))) for row in rows]
    for path in tree.paths:
        assert tree.parents[path].tolist() == [-1, *path[:-1]]
    assert tree.ids.tolist() == [5, 6, 7, 8, 9, 4]


def test_equal_samples_count_each() -> None:
    twice = Sample(ids(1, 2), np.array([True, True]), np.array([-1.0, -2.0], np.float32), 0.5)
    packed = pack_pass([PackedGroup("k", ids(9), (twice, twice))])
    assert packed.ids.tolist() == [9, 1, 2]
    assert packed.targets.tolist() == [1, 2]
    assert packed.rows.tolist() == [0, 1, 0, 1]
    assert packed.advantages.tolist() == [0.5] * 4


def test_a_pass_holds_what_fits_with_the_trunk_counted_once() -> None:
    groups = [random_group(seed, np.arange(50, dtype=np.int32)) for seed in range(6)]
    whole = len(pack_pass(groups).ids)
    assert [len(packed.ids) for packed in plan_passes(groups, whole)] == [whole]
    parts = [len(packed.ids) for packed in plan_passes(groups, whole - 1)]
    assert len(parts) == 2
    assert max(parts) < whole
    assert [len(packed.ids) for packed in plan_passes(groups, 1)] == [len(pack_pass([g]).ids) for g in groups]


def test_common_prefix() -> None:
    assert common_prefix([ids(5, 6, 7), ids(5, 6, 7)]) == 3
    assert common_prefix([ids(5, 6, 7), ids(5, 9, 7)]) == 1
    assert common_prefix([ids(5, 6, 7), ids(8)]) == 0


def test_observations_carry_no_loss_and_the_tail_is_cut() -> None:
    sample = sample_from_turns([turn([1, 2], [30, 31]), turn([3], [40])], 1.5)
    assert sample.ids.tolist() == [1, 2, 30, 31, 3]
    assert sample.loss_mask.tolist() == [True, True, False, False, True]
    assert np.isnan(sample.logprobs[~sample.loss_mask]).all()
    assert sample.advantage == 1.5


def test_unscored_members_shrink_the_group() -> None:
    task = Task("k", "sums", 0, "q", "a")
    right, wrong = episode(Scored(1.0), turn([1], [])), episode(Scored(0.0), turn([2], []))
    lost = episode(Unscored("SANDBOX_LOST", "exec", "gone"), turn([3], []))
    packed = pack_group(Group(task, ids(7), (right, lost, wrong)))
    assert packed is not None
    assert [sample.ids.tolist() for sample in packed.samples] == [[1], [2]]
    assert [sample.advantage for sample in packed.samples] == [1.0, -1.0]
    assert pack_group(Group(task, ids(7), (right, lost))) is None
    assert pack_group(Group(task, ids(7), (right, right, lost))) is None


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="has no token"):
        pack_pass([PackedGroup("k", ids(), random_group(0, ids(1)).samples)])
