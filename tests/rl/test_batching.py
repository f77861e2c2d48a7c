"""Packed groups must train exactly as unpacked samples do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from rl.batching import (
    common_prefix,
    pack_group,
    pack_pass,
    packed_tokens,
    plan_passes,
    sample_from_turns,
)
from rl.config import TrainerConfig
from rl.trainer import TorchTrainer
from rl.types import (
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


def random_group(seed: int, trunk: np.ndarray) -> PackedGroup:
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([trunk, rng.integers(0, VOCABULARY, rng.integers(1, 9))]).astype(np.int32)
    samples = []
    for _ in range(4):
        length = int(rng.integers(2, 15))
        mask = rng.random(length) < 0.7
        mask[-1] = True
        logprobs = np.where(mask, rng.normal(-4.5, 0.3, length), np.nan).astype(np.float32)
        samples.append(
            Sample(rng.integers(0, VOCABULARY, length).astype(np.int32), mask, logprobs, float(rng.normal()))
        )
    return PackedGroup(f"task-{seed}", prompt, tuple(samples))


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


@pytest.mark.parametrize("max_pass_tokens", [1, 10_000])
def test_packed_loss_and_gradients_equal_unpacked(max_pass_tokens: int) -> None:
    trunk = np.arange(11, dtype=np.int32)
    groups = [random_group(seed, trunk) for seed in range(3)]
    reference = tiny_llama()
    loss = unpacked_loss(reference, groups, cap=1.2)
    loss.backward()
    model = tiny_llama()
    trainer = TorchTrainer(model, TrainerConfig(ratio_cap=1.2))
    total = sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)
    passes = list(plan_passes(groups, max_pass_tokens))
    sums = [trainer.accumulate(packed, total) for packed in passes]
    assert len(passes) == (3 if max_pass_tokens == 1 else 1)
    assert sum(part["loss"] for part in sums) == pytest.approx(loss.item(), abs=1e-5)
    for (name, expected), (_, got) in zip(
        reference.named_parameters(), model.named_parameters(), strict=True
    ):
        assert expected.grad is not None
        assert got.grad is not None
        assert torch.allclose(got.grad, expected.grad, atol=1e-5, rtol=1e-4), name
    assert float(model.get_input_embeddings().weight.grad.norm()) > 1e-3  # type: ignore[union-attr]


def test_every_token_is_computed_once() -> None:
    trunk = np.arange(20, dtype=np.int32)
    groups = [random_group(seed, trunk) for seed in range(3)]
    shared = common_prefix([group.prompt_ids for group in groups])
    packed = pack_pass(groups)
    own = sum(len(g.prompt_ids) - shared + sum(len(s.ids) for s in g.samples) for g in groups)
    assert shared >= 20
    assert len(packed.ids) == len(packed.positions) == shared + own
    assert packed.segments[-1].end == len(packed.ids)


def test_a_pass_holds_what_fits_with_the_trunk_counted_once() -> None:
    groups = [random_group(seed, np.arange(50, dtype=np.int32)) for seed in range(6)]
    whole = packed_tokens(groups)
    assert [len(packed.ids) for packed in plan_passes(groups, whole)] == [whole]
    parts = [len(packed.ids) for packed in plan_passes(groups, whole - 1)]
    assert len(parts) == 2
    assert max(parts) < whole
    assert [len(packed.ids) for packed in plan_passes(groups, 1)] == [packed_tokens([g]) for g in groups]


def test_samples_restart_after_their_prompt() -> None:
    group = PackedGroup("k", ids(1, 2, 3), tuple(random_group(s, ids(9)).samples[0] for s in (1, 2)))
    packed = pack_pass([group])
    for segment in packed.segments[1:]:
        assert packed.positions[segment.start] == 3
        assert segment.ancestors == (0,)
    firsts = [np.flatnonzero(sample.loss_mask)[0] for sample in group.samples]
    if firsts[0] == 0:
        assert packed.sources[0] == 2


def test_prompt_equal_to_the_trunk_keeps_a_token_of_its_own() -> None:
    same = ids(5, 6, 7)
    assert common_prefix([same, same]) == 2
    assert common_prefix([same, ids(5, 9, 7)]) == 1
    assert common_prefix([same, ids(8)]) == 0


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
    with pytest.raises(ValueError, match="without a token"):
        pack_pass([PackedGroup("k", ids(), random_group(0, ids(1)).samples)])
