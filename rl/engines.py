"""What a run holds that is costly to start: the generator and the trainer, with their model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rl.config import Config
from rl.dialogue import Tokenizer
from rl.fakes import FakeTrainer
from rl.generator import Generator
from rl.generators.fake import ByteTokenizer
from rl.generators.opening import open_generator
from rl.model import ChatTokenizer, prepare_model
from rl.precision import resolve
from rl.progress import Progress
from rl.rehearsal import empty_model, fake_generator
from rl.start import Start
from rl.trainer_process import Trainer, start_trainer
from rl.weights import open_segment_file, weights_directory


@dataclass(frozen=True, slots=True)
class Engines:
    """What a run holds that is costly to start, ready to use."""

    generator: Generator
    trainer: Trainer
    model_path: Path
    weights: Path
    tokenizer: Tokenizer
    segment: Path | None


@asynccontextmanager
async def open_engines(config: Config, start: Start, progress: Progress) -> AsyncIterator[Engines]:
    """Starts the generator and the trainer side by side, for the length of the block."""
    rehearsed = config.trainer.backend == "fake"
    if rehearsed:
        model_path = await asyncio.to_thread(empty_model, config.directory / "model")
    else:
        progress.say("preparing the model")
        model_path = await asyncio.to_thread(prepare_model, config.model, config.models_dir)
    tokenizer = ByteTokenizer() if rehearsed else ChatTokenizer(model_path)
    logs = config.directory.resolve() / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    precision = resolve(config.precision)
    async with AsyncExitStack() as stack:
        weights = await stack.enter_async_context(weights_directory())
        # An adapter goes as files: it is small, and not laid out as the engine's weights are.
        by_file = config.generator.weights == "file" or config.trainer.lora_rank > 0
        by_file |= config.generator.backend == "fake"
        segment = None if by_file else stack.enter_context(open_segment_file(weights))
        trainer: Trainer = FakeTrainer()
        generator: Generator = fake_generator(tokenizer, config.seed)
        async with asyncio.TaskGroup() as starting:
            if not rehearsed:
                trainer = process = await stack.enter_async_context(start_trainer(logs / "trainer.log"))
                progress.say(f"starting the generator and the trainer, in {precision}")
                starting.create_task(process.load(model_path.resolve(), config.trainer, precision))
            if config.generator.backend != "fake":
                opened = open_generator(config, model_path, logs, precision)
                generator = await stack.enter_async_context(opened)
        if start.checkpoint is not None:
            await trainer.restore(start.checkpoint.resolve())
        yield Engines(generator, trainer, model_path.resolve(), weights, tokenizer, segment)
