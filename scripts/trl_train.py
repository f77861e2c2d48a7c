"""Trains on the problems of a settings file with TRL's GRPOTrainer; leaves what `python -m rl versus` reads.

Run by scripts/trl.sh in a virtual environment of its own. Problems, prompts, verifier, sandboxes, limits,
group size, learning rate and number of samples are those of the settings; problems come in equal shares, as
with `--no-filter`, for GRPOTrainer takes them as they come. What is the trainer's own is tuned: bfloat16 if
the processor has units for it, weights cast once a generation, the loop's allocator, threads and AdamW, no
checkpoints, no gradient checkpointing. Its clock stands still while weights are kept for the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl.config import Config, load
from rl.curriculum import Uniform
from rl.dialogue import FENCE, Dialogue
from rl.kept_weights import step_directory
from rl.model import ChatTokenizer, prepare_model
from rl.precision import resolve
from rl.referee import Referee
from rl.run import task_source
from rl.sandboxes import DaemonSandboxes, own_daemon
from rl.start import find_start
from rl.tasks import TaskSource
from rl.trainer import ADAM_BETAS, prepare_torch
from rl.types import Task
from rl.weights import WEIGHTS_FILE, link_model_files
from sandboxd import Client


class Verdicts:
    """GRPOTrainer's reward function: every sample's code runs in a leased sandbox, all of a batch at once."""

    __name__ = "verdicts"

    def __init__(self, config: Config, source: TaskSource, dialogue: Dialogue, tasks: list[Task]) -> None:
        self._config = config
        self._referee = Referee(source, config.episode.verify_seconds)
        self._source = source
        self._dialogue = dialogue
        self._tasks = {task.key: task for task in tasks}
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __enter__(self) -> Verdicts:
        self._wait(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._stack.aclose())

    def __call__(self, completions: list[str], key: list[str], **_: Any) -> list[float | None]:
        return self._wait(self._judge_all(list(zip(key, completions, strict=True))))

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        wanted = self._config.sandboxes
        daemon = own_daemon(wanted, self._config.directory)
        address = wanted.address or await self._stack.enter_async_context(daemon)
        client = await self._stack.enter_async_context(Client(address))
        self._sandboxes = DaemonSandboxes.of(client, wanted)

    async def _judge_all(self, attempts: list[tuple[str, str]]) -> list[float | None]:
        return list(await asyncio.gather(*(self._judge(self._tasks[key], text) for key, text in attempts)))

    async def _judge(self, task: Task, completion: str) -> float:
        family = self._source.sandboxed(task)
        assert family is not None
        code = self._dialogue.find_code(family.rules.style.opening + completion)
        if code is None:
            return 0.0
        async with self._sandboxes.acquire() as box:
            return await self._referee.judge(task, code, box)


class Timed(GRPOTrainer):
    """Counts seconds and tokens of each generation; `bfloat16` weights are cast once for all its tokens."""

    lower = False
    generating = 0.0
    generated = trained = 0

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.lower):
            result = super()._generate_single_turn(*arguments, **named)
        self.generating += time.perf_counter() - began
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        lengths = output["completion_mask"].sum(1)
        self.generated = int(lengths.sum())
        # As in the loop: what has no advantage is generated, and teaches nothing.
        self.trained = int(lengths[output["advantages"] != 0].sum())
        return output


class Rows(TrainerCallback):
    """Writes a row a step and keeps the weights. The clock starts with training."""

    def __init__(self, config: Config, model_path: Path, factors: torch.dtype) -> None:
        self._config = config
        self._model_path = model_path
        self._factors = factors
        self.rows: list[dict[str, float]] = []
        self.trainer: Timed | None = None
        self._began = self._aside = self._last = self._processor = 0.0

    def _clock(self) -> float:
        return time.perf_counter() - self._began - self._aside

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began, self._processor = time.perf_counter(), time.process_time()

    def on_step_end(self, _: Any, state: Any, *__: Any, model: Any, **___: Any) -> None:
        trainer, now = self.trainer, self._clock()
        assert trainer is not None
        step, waited = now - self._last, trainer.generating
        self.rows.append(
            {
                "step": float(state.global_step),
                "time/wall": now,
                "time/step": step,
                "time/wait_for_batch": waited,
                "time/train": step - waited,
                "time/processor": time.process_time() - self._processor,
                "train/tokens": trainer.trained,
                "rollout/generated_tokens": trainer.generated,
                "rollout/episodes": self._config.groups_per_batch * self._config.samples_per_group,
            }
        )
        self._last, trainer.generating = now, 0.0
        sys.stdout.write(f"{json.dumps(self.rows[-1])}\n")
        sys.stdout.flush()
        paused = time.perf_counter()
        if state.global_step % self._config.heldout.weights_every_steps == 0:
            self._keep(model, state.global_step)
        self._aside += time.perf_counter() - paused

    def _keep(self, model: Any, step: int) -> None:
        target = step_directory(self._config.directory, step)
        link_model_files(self._model_path, target)
        weights = {name: p.detach().to(self._factors).contiguous() for name, p in model.named_parameters()}
        save_file(weights, target / WEIGHTS_FILE)


def draw(config: Config, source: TaskSource) -> list[Task]:
    """The tasks that the loop would be given without its filter, in their order."""
    places = [(family, level) for family, count in source.levels().items() for level in range(count)]
    drawn = Uniform(source, places, seed=config.seed)
    return [drawn.next_task() for _ in range(config.steps * config.groups_per_batch)]


def dataset(tasks: list[Task], dialogue: Dialogue, source: TaskSource, tokenizer: Any) -> Dataset:
    """Prompts as text. Raises SystemExit unless the trainer reads them as the very tokens of the loop."""
    rows = []
    for task in tasks:
        family = source.sandboxed(task)
        if family is None or family.rules.answer != "code":
            raise SystemExit(
                f"trl: {task.family} is no task of one turn; name families that begin with one_turn_"
            )
        ids = dialogue.styled(family.rules.style).prompt(task.question).tolist()
        prompt = tokenizer.decode(ids)
        if tokenizer(text=prompt)["input_ids"] != ids:
            raise SystemExit(f"trl: the prompt of {task.key} is read as other tokens than the loop's")
        rows.append({"prompt": prompt, "key": task.key})
    return Dataset.from_list(rows)


def settings(config: Config, *, lower: bool, passes: int) -> GRPOConfig:
    """GRPOTrainer's, out of the run's; a batch is trained in `passes` parts."""
    trainer = config.trainer
    samples = config.groups_per_batch * config.samples_per_group
    return GRPOConfig(
        output_dir=str(config.directory / "trl"),
        use_cpu=True,
        bf16=lower,
        seed=config.seed,
        max_steps=config.steps,
        per_device_train_batch_size=samples // passes,
        gradient_accumulation_steps=passes,
        num_generations=config.samples_per_group,
        max_completion_length=config.episode.turn_tokens,
        temperature=1.0,
        learning_rate=trainer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=trainer.warmup_steps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        optim="adamw_torch_fused",
        adam_beta1=ADAM_BETAS[0],
        adam_beta2=ADAM_BETAS[1],
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        scale_rewards="group",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_vllm=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def build_model(path: Path, tokenizer: Any) -> Any:
    """Turns end where the loop's do: at the end of turn, or at the fence that closes the block."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fences = [number for text, number in tokenizer.get_vocab().items() if FENCE in text]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *fences]
    return model


def summary(config: Config, rows: list[dict[str, float]]) -> dict[str, Any]:
    """What the loop's own summary says of the same things."""
    waited, trained = (sum(row[name] for row in rows) for name in ("time/wait_for_batch", "time/train"))
    return {
        "name": config.name,
        "seed": config.seed,
        "steps": len(rows),
        "loop_s": rows[-1]["time/wall"],
        "trained_tokens": sum(row["train/tokens"] for row in rows),
        "generated_tokens": sum(row["rollout/generated_tokens"] for row in rows),
        "wait_ratio": waited / (waited + trained),
        "generator_idle_ratio": trained / (waited + trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file of settings, as for `python -m rl train`")
    parser.add_argument("--name", help="name of the run, and of its directory")
    parser.add_argument("--runs-dir", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--passes", type=int, help="parts of a batch (default: a group each)")
    arguments = parser.parse_args()
    overrides = {key: getattr(arguments, key) for key in ("name", "runs_dir", "seed", "steps", "precision")}
    config = load(arguments.config, overrides)
    if not config.heldout.weights_every_steps:
        raise SystemExit(
            f"trl: {arguments.config}: heldout.weights_every_steps = 0: nothing could be measured"
        )
    find_start(config, resume=False)
    model_path = prepare_model(config.model, config.models_dir).resolve()
    lower = resolve(config.precision) == "bfloat16"
    prepare_torch(config.trainer.threads)
    source, dialogue = task_source(config), Dialogue(ChatTokenizer(model_path))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tasks = draw(config, source)
    problems = dataset(tasks, dialogue, source, tokenizer)
    model = build_model(model_path, tokenizer)
    rows = Rows(config, model_path, torch.bfloat16 if lower else torch.float32)
    with Verdicts(config, source, dialogue, tasks) as verdicts:
        trainer = Timed(
            model,
            reward_funcs=verdicts,
            args=settings(config, lower=lower, passes=arguments.passes or config.groups_per_batch),
            train_dataset=problems,
            processing_class=tokenizer,
            callbacks=[rows],
        )
        trainer.lower, rows.trainer = lower, trainer
        trainer.train()
    lines = "".join(json.dumps(row) + "\n" for row in rows.rows)
    (config.directory / "metrics.jsonl").write_text(lines)
    (config.directory / "summary.json").write_text(json.dumps(summary(config, rows.rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
