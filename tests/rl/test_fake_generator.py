"""The fake generator behaves as the real one does where the loop can tell: stops, spans, updates, death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rl.generator import Generation, GeneratorDead, Sampling, UpdateFailed
from rl.generators.fake import ByteTokenizer, FakeGenerator
from rl.ledger import Ledger, MeteredGenerator
from rl.types import VersionSpan

TOKENIZER = ByteTokenizer()
PROMPT = np.array(TOKENIZER.encode("<|im_start|>user\nhello"), np.int32)


def fake(text: str) -> FakeGenerator:
    return FakeGenerator(TOKENIZER, lambda *_: text)


def draw(text: str, sampling: Sampling) -> Generation:
    return asyncio.run(fake(text).generate(PROMPT, sampling))


def test_the_tokenizer_is_exact_both_ways() -> None:
    text = "a\n<|im_start|>é<|im_end|>\x00~"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_turn_ends_at_its_stop_text_which_is_kept() -> None:
    drawn = draw("one STOP two END", Sampling(max_tokens=99, stop=("END", "STOP")))
    assert TOKENIZER.decode(drawn.ids.tolist()) == "one STOP"
    assert drawn.finish_reason == "stop"


def test_a_turn_without_a_stop_text_ends_with_the_end_token() -> None:
    drawn = draw("one", Sampling(max_tokens=99))
    assert drawn.ids.tolist() == [*b"one", TOKENIZER.end_of_turn]
    assert len(drawn.logprobs) == 4
    assert drawn.spans == (VersionSpan(0, 0, 4),)


def test_a_long_turn_is_cut() -> None:
    drawn = draw("abcdef", Sampling(max_tokens=3))
    assert (drawn.ids.tolist(), drawn.finish_reason) == ([*b"abc"], "length")


def test_an_update_that_fails_leaves_the_version() -> None:
    async def body() -> None:
        generator = FakeGenerator(TOKENIZER, lambda *_: "x", failing_updates=[2])
        await generator.update_weights(Path("w"), 1)
        for version in (2, 1):
            with pytest.raises(UpdateFailed):
                await generator.update_weights(Path("w"), version)
        assert generator.version == 1
        assert (await generator.generate(PROMPT, Sampling(max_tokens=9))).spans[0].version == 1
        assert generator.stats().updates == 1

    asyncio.run(body())


def test_death_ends_the_calls_that_wait_and_all_later_ones() -> None:
    async def body() -> None:
        reached = asyncio.Event()

        def gate() -> asyncio.Event:
            reached.set()
            return asyncio.Event()

        generator = FakeGenerator(TOKENIZER, lambda *_: "x", gate=gate)

        async def wait() -> None:
            with pytest.raises(GeneratorDead):
                await generator.generate(PROMPT, Sampling(max_tokens=9))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait())
            await reached.wait()
            assert generator.stats().running == 1
            generator.die()
        assert generator.stats().running == 0
        await wait()
        with pytest.raises(GeneratorDead):
            await generator.update_weights(Path("w"), 1)

    asyncio.run(body())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1, temperature=0.7),
        Sampling(max_tokens=1, top_p=0.9),
        Sampling(max_tokens=1, top_k=5),
    ],
)
def test_only_draws_from_the_policy_itself_may_be_trained_on(sampling: Sampling) -> None:
    Sampling(max_tokens=1).check_trainable()
    with pytest.raises(ValueError, match="cannot be trained on"):
        sampling.check_trainable()
    metered = MeteredGenerator(fake("one"), Ledger())
    with pytest.raises(ValueError, match="cannot be trained on"):
        asyncio.run(metered.generate(PROMPT, sampling))
    assert metered.ledger.tokens.generated == 0
    with pytest.raises(ValueError, match="at least one token"):
        Sampling(max_tokens=0)
