"""The policy's optimiser: one step on one batch, in this process, with torch."""

from __future__ import annotations

import copy
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl import lora, packed_attention
from rl.batching import PackedPass, pack_pass, plan_passes
from rl.config import TrainerConfig
from rl.errors import CheckpointFailed, ConfigError, NonFiniteStep
from rl.losses.recipes import Totals
from rl.losses.tokens import PassTokens, token_logprobs
from rl.losses.total import policy_loss
from rl.precision import Precision
from rl.shared_weights import SharedWeights
from rl.types import Batch, PackedGroup, Sample, StepReport

ADAM_BETAS = (0.9, 0.95)
"""The second moment follows within about 20 steps: a run here is tens of steps long, not thousands."""

WARM_UP_TOKENS = 32

SAVED_PER_LAYER = 40
"""Numbers that a layer saves of a token for the backward pass, in units of the hidden width; measured."""


class TorchTrainer:
    """Model and AdamW state, float32; matrix products take factors in `precision`. `step_count` is the number
    of steps taken since the base model. With a divergence in the loss, its reference is a copy of the model
    as it was given, which `restore` leaves alone: a second model in memory, and a forward pass more. With
    adapters (`rl.lora`) the base model is the reference, and "weights" are the adapters' alone.

    A step accumulates gradients and changes the weights only at its end, under `_weights`; `save` and
    `write_weights` may therefore be called from another thread at any time and see whole steps only.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainerConfig, precision: Precision = "float32"
    ) -> None:
        packed_attention.register()
        model.set_attn_implementation(packed_attention.ATTENTION_NAME)
        model.train()
        self.model = model
        self.step_count = 0
        self._config = config
        self._objective = config.objective
        diverging = config.kl_coefficient > 0
        self._reference = frozen_copy(model) if diverging and not config.lora_rank else None
        if config.lora_rank:
            lora.add_adapters(model, config.lora_rank, config.lora_alpha)
            self._reference = model if diverging else None
        self._factors = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._weights = threading.Lock()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shared: SharedWeights | None = None
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=ADAM_BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @classmethod
    def load(cls, model_path: Path, config: TrainerConfig, precision: Precision = "float32") -> TorchTrainer:
        """Reads a transformers model directory. Raises ConfigError when it is none."""
        if not (model_path / "config.json").is_file():
            raise ConfigError(f"model {model_path} is not a directory with a config.json")
        prepare_torch(config.threads)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        # Loading draws from a state that differs from process to process; a run's is the same each time.
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.to(device), config, precision)

    def warm_up(self) -> None:
        """Pages in the memory of a full pass and computes a short one, while the generator still starts.

        The allocator keeps what is freed (see `trainer_process.ALLOCATOR`), so a pass later finds it.
        """
        if self.model.device.type == "cpu":
            layers = self.model.config.num_hidden_layers * self.model.config.hidden_size * SAVED_PER_LAYER
            torch.zeros(self._config.max_pass_tokens * (layers + 2 * self.model.config.vocab_size))
        ids = np.zeros(WARM_UP_TOKENS, np.int32)
        likely = np.full(WARM_UP_TOKENS, -1.0, np.float32)
        sample = Sample(ids, np.ones(WARM_UP_TOKENS, np.bool_), likely, 1.0)
        packed = pack_pass([PackedGroup("warm-up", ids, (sample,))])
        self.accumulate(packed, Totals(packed.targets.size, 1))
        self._optimizer.zero_grad(set_to_none=False)

    def step(self, batch: Batch) -> StepReport:
        """One optimiser step. Raises NonFiniteStep, with weights and optimiser as they were before."""
        began = time.perf_counter()
        totals = Totals(batch.trained_count, batch.sample_count)
        if totals.tokens == 0:
            raise ValueError(f"batch of step {batch.step} has no token to train on")
        sums: Counter[str] = Counter()
        for packed in plan_passes(batch.groups, self._config.max_pass_tokens):
            sums.update(self.accumulate(packed, totals))
        norm = self._apply(sums["loss"])
        counted = max(sums["tokens"], 1)
        extra = {"entropy": sums["entropy"] / counted, "masked_tokens": sums["masked"]}
        if self._reference is not None:
            extra["reference_kl"] = sums["reference_kl"] / counted
        return StepReport(
            step=batch.step,
            loss=sums["loss"],
            grad_norm=norm,
            trained_tokens=int(sums["tokens"]),
            forwarded_tokens=int(sums["forwarded"]),
            unshared_tokens=batch.unshared_count,
            mean_ratio=sums["ratio"] / counted,
            clipped_fraction=sums["clipped"] / counted,
            mismatch_kl=sums["kl"] / counted,
            train_seconds=time.perf_counter() - began,
            extra=extra,
        )

    def logprobs(self, packed: PackedPass, model: PreTrainedModel | None = None) -> Tensor:
        """Log-probabilities of the loss tokens of a pass under the present weights, or those of another
        `model` with the same vocabulary, shape (L,)."""
        model = model or self.model
        device = self.model.device
        sources = torch.from_numpy(packed.sources).to(device)
        targets = torch.from_numpy(packed.targets).to(device)
        lower = self._factors != torch.float32
        with torch.autocast(device.type, self._factors, enabled=lower):
            hidden = model.base_model(
                input_ids=torch.from_numpy(packed.ids).long().to(device)[None],
                position_ids=torch.from_numpy(packed.positions).to(device)[None],
                use_cache=False,
                tree=packed_attention.tree_of(packed, device, self._factors),
            ).last_hidden_state[0]
            unique = token_logprobs(hidden[sources], model.get_output_embeddings().weight, targets)
        return unique[torch.from_numpy(packed.rows).to(device)]

    def accumulate(self, packed: PackedPass, totals: Totals) -> dict[str, float]:
        """Adds the gradient of one pass of a batch with these totals. Its loss is the pass's share."""
        device = self.model.device
        inputs = PassTokens(
            logprobs=self.logprobs(packed),
            sampler_logprobs=torch.from_numpy(packed.logprobs).to(device),
            advantages=torch.from_numpy(packed.advantages).to(device),
            samples=torch.from_numpy(packed.samples).to(device),
            sample_count=packed.sample_count,
            reference_logprobs=self._reference_logprobs(packed),
        )
        sums = policy_loss(inputs, self._objective, totals)
        sums.loss.backward()
        return {
            "loss": sums.loss.item(),
            "tokens": sums.token_count,
            "masked": sums.masked_count,
            "forwarded": len(packed.ids),
            "ratio": sums.ratio_sum,
            "clipped": sums.clipped_count,
            "kl": sums.kl_sum,
            "entropy": sums.entropy_sum,
            "reference_kl": sums.reference_kl_sum,
        }

    def _reference_logprobs(self, packed: PackedPass) -> Tensor | None:
        if self._reference is None:
            return None
        off = lora.adapters_off(self.model) if self._reference is self.model else nullcontext()
        with torch.no_grad(), off:
            return self.logprobs(packed, self._reference)

    def _apply(self, loss: float) -> float:
        """Clips, checks and applies the accumulated gradient; returns its norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=False)
            raise NonFiniteStep(f"loss {loss}, norm {norm} at step {self.step_count + 1}: not applied")
        with self._weights:
            for group in self._optimizer.param_groups:
                group["lr"] = self._config.learning_rate * self._warmup()
            self._optimizer.step()
            self.step_count += 1
        # Kept allocated and zeroed: handing the memory back would page it in anew at every step.
        self._optimizer.zero_grad(set_to_none=False)
        return norm

    def _warmup(self) -> float:
        """AdamW's first steps have unit size whatever the gradient; the rate rises linearly over them."""
        return min(1.0, (self.step_count + 1) / max(self._config.warmup_steps, 1))

    def write_weights(self, path: Path) -> int:
        """Writes the weights as one safetensors file in the precision of factors, tied ones once; returns
        their step. Adapters are written as peft has them, beside where `path` would be."""
        with self._weights:
            if self._config.lora_rank:
                lora.write_adapter(self.model, path.parent)
                return self.step_count
            parameters = self._parameters.items()
            save_file({name: p.detach().to(self._factors).contiguous() for name, p in parameters}, path)
            return self.step_count

    def share_weights(self, path: Path, version: int) -> int:
        """Writes the weights as `version` into the segment `path`, at first an empty file, in the precision
        of factors, tied ones once; returns their step."""
        with self._weights:
            if self._shared is None or self._shared.path != path:
                self._shared = SharedWeights(path, self._parameters, self._factors)
            self._shared.write(version, self._parameters)
            return self.step_count

    def save(self, directory: Path) -> int:
        """Writes weights, optimiser and random states into an existing directory; returns the step they
        belong to; of adapters also peft's files. Raises CheckpointFailed when the disk does not take them."""
        with self._weights:
            weights = {name: p.detach().contiguous() for name, p in self._parameters.items()}
            state = {"step": self.step_count, "updates": self._update_counts()}
            try:
                save_file(weights, directory / "model.safetensors")
                save_file(dict(self._moments()) | random_states(), directory / "optimizer.safetensors")
                (directory / "trainer.json").write_text(json.dumps(state))
                if self._config.lora_rank:
                    lora.write_adapter(self.model, directory)
            except (OSError, SafetensorError) as error:
                raise CheckpointFailed(str(error)) from error
            return self.step_count

    def restore(self, directory: Path) -> int:
        """Reads what `save` wrote; returns its step. Raises ConfigError when the model differs."""
        state = json.loads((directory / "trainer.json").read_text())
        weights = load_file(directory / "model.safetensors")
        shapes = {name: value.shape for name, value in weights.items()}
        if shapes != {name: parameter.shape for name, parameter in self._parameters.items()}:
            raise ConfigError(f"checkpoint {directory} is of another model: its parameters differ")
        moments = load_file(directory / "optimizer.safetensors")
        with self._weights, torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                updates = state["updates"].get(name)
                if updates is not None:
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(updates), device=parameter.device),
                        "exp_avg": moments[f"exp_avg.{name}"].to(parameter.device),
                        "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(parameter.device),
                    }
            self.step_count = int(state["step"])
        set_random_states(moments)
        return self.step_count

    def _moments(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in self._optimizer.state[parameter]:
                    yield f"{moment}.{name}", self._optimizer.state[parameter][moment]

    def _update_counts(self) -> dict[str, int]:
        return {
            name: int(self._optimizer.state[parameter]["step"])
            for name, parameter in self._parameters.items()
            if "step" in self._optimizer.state[parameter]
        }


def random_states() -> dict[str, Tensor]:
    """The state of torch's generators, as tensors to be saved beside others."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng.cuda.{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_states(saved: Mapping[str, Tensor]) -> None:
    """Sets what `random_states` returned; devices that are not here are left out."""
    torch.set_rng_state(saved["rng.cpu"])
    for number in range(torch.cuda.device_count()):
        if (state := saved.get(f"rng.cuda.{number}")) is not None:
            torch.cuda.set_rng_state(state, number)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it is now; it takes no gradient and no part in training."""
    copied: PreTrainedModel = copy.deepcopy(model).eval()
    copied.requires_grad_(False)
    return copied


def prepare_torch(threads: int) -> None:
    """Process-wide settings: denormal moments cost 100 times a normal multiplication on most processors."""
    torch.set_flush_denormal(True)
    if threads > 0:
        torch.set_num_threads(threads)
