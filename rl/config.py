"""The settings of a run: what may be in its TOML file, with which default, and what each means.

This is the only module of the loop that reads a settings file or the environment. Unknown keys are
refused with the nearest known one; every message names the key, the value and the way out.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from rl.advantage import AdvantageRule
from rl.config_curriculum import CurriculumConfig
from rl.config_faults import explain
from rl.config_section import Section
from rl.errors import ConfigError
from rl.losses.recipes import (
    DEFAULT_LENGTH_TOKENS,
    DEFAULT_RATIO_CAP,
    RECIPES,
    KlName,
    LossName,
    Objective,
)
from rl.otel import protocol
from rl.policies import PolicyName, QueueRules

SETTINGS_FILE = "config.toml"
"""A run's own copy of its settings, in its directory."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]


class TrainerConfig(Section):
    """How one optimiser step is taken."""

    backend: Literal["torch", "fake"] = "torch"
    """What takes it; `fake` counts steps and changes nothing, for a rehearsal without a model."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """AdamW's rate once it has warmed up; constant from then on."""
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    """Steps over which the rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients longer than this are shortened to it."""
    loss: LossName = "tis"
    """The policy loss; see the table above. A number that the loss does not read is refused."""
    ratio_cap: Annotated[float, Field(ge=1, le=1e6)] = DEFAULT_RATIO_CAP
    """Largest importance weight of a token, or of a sample."""
    ratio_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Smallest importance weight that is not masked; the loss's own when unset."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """How far below 1 a ratio may fall before it is clipped; the loss's own when unset."""
    clip_high: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """How far above 1 a ratio may rise before it is clipped; the loss's own when unset."""
    length_tokens: Count = DEFAULT_LENGTH_TOKENS
    """What `dr_grpo` divides the sum over a sample's tokens by; best what an episode may sample at most."""
    overlong_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Over so many tokens before an episode's limit its reward falls by up to 1; never when 0."""
    kl_coefficient: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Weight of the divergence from the model that the run began with; its copy costs memory and time."""
    kl_estimator: KlName = "k3"
    """How the divergence is estimated."""
    lora_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of the low-rank adapters that are trained in place of the whole model; the whole model when 0."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """An adapter counts alpha / rank times."""
    max_pass_tokens: Count = 2048
    """Tokens of one forward and backward pass; more need more memory (about 3 MB each at 135M parameters)."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Processor threads; all cores when 0."""

    @field_validator("ratio_cap", "ratio_floor", "clip_low", "clip_high", "length_tokens")
    @classmethod
    def _is_read(cls, value: float | None, info: ValidationInfo) -> float | None:
        """A number that the loss ignores is a mistake. Defaults pass: a written-out file holds them all."""
        loss, name = info.data.get("loss"), str(info.field_name)
        if loss is None or value == cls.model_fields[name].default or name in RECIPES[loss].dials:
            return value
        readers = ", ".join(each for each, recipe in RECIPES.items() if name in recipe.dials)
        raise ValueError(f"loss {loss!r} does not read it; leave it out, or choose one of {readers}")

    @property
    def objective(self) -> Objective:
        """The loss with all its numbers."""
        own = RECIPES[self.loss].dials
        return Objective(
            loss=self.loss,
            ratio_cap=self.ratio_cap,
            ratio_floor=own.get("ratio_floor", 0.0) if self.ratio_floor is None else self.ratio_floor,
            clip_low=own.get("clip_low", 0.0) if self.clip_low is None else self.clip_low,
            clip_high=own.get("clip_high", 0.0) if self.clip_high is None else self.clip_high,
            length_tokens=self.length_tokens,
            kl_coefficient=self.kl_coefficient,
            kl_estimator=self.kl_estimator,
        )


class QueueConfig(Section):
    """What enters the queue between rollouts and trainer, in which order it leaves, what is given up."""

    policy: PolicyName = "windowed"
    """How it is kept; docs/rl.md has the table."""
    spare_groups: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Groups started beyond those that can all be trained; the slowest are given up."""
    spare_samples: Annotated[int, Field(ge=0, le=1024)] = 0
    """Attempts of a group started beyond `samples_per_group`; the slowest are given up."""
    min_samples: Annotated[int, Field(ge=2, le=1024)] = 2
    """Fewest verdicts of a group that is trained; one with fewer is replaced."""

    @property
    def rules(self) -> QueueRules:
        """What the policy needs of it."""
        return QueueRules(self.policy, self.spare_groups, self.min_samples)


class EpisodeConfig(Section):
    """What one attempt may use."""

    max_turns: Count = 3
    """Turns of the model, the final answer included."""
    turn_tokens: Count = 64
    """Tokens of one turn."""
    context_tokens: Count = 1024
    """Tokens of the whole dialogue."""
    code_seconds: Seconds = 5.0
    """One run of code in the sandbox."""
    turn_seconds: Seconds = 120.0
    """Sampling one turn; an episode whose turn takes longer is given up and counts for nothing."""
    verify_seconds: Seconds = 30.0
    """Each call of a task's own code; an episode where it takes longer counts for nothing."""
    seconds: Seconds = 120.0
    """The whole attempt; one that takes longer is given up and counts for nothing."""

    @property
    def sampled_limit(self) -> int:
        """Tokens that an episode can sample at most."""
        return min(self.max_turns * self.turn_tokens, self.context_tokens)


class GeneratorConfig(Section):
    """What draws the tokens."""

    backend: Literal["vllm", "fake"] = "vllm"
    """Whose engine; `fake` can only add, for a rehearsal without a model."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 26)] = 1 << 30
    """Memory for keys and values."""
    compiled: bool = False
    """Compile the model first: a slower start, worth it on a GPU."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Engines of the run's own, side by side on this host; one that dies is started again."""
    servers: list[str] = Field(default_factory=list)
    """vLLM servers to draw from instead, such as `http://host:8000`; see docs/rl.md."""
    weights: Literal["shared_memory", "file", "nccl", "gloo"] = "shared_memory"
    """How new weights reach it: out of the trainer's memory, or by a file, slower, in vLLM's own way. Servers
    that were started for it take them over the network, too: GPUs by `nccl`, others by `gloo`."""
    address: str = ""
    """Where servers on other hosts find this one, for `nccl` and `gloo`; found out when empty."""

    @field_validator("servers")
    @classmethod
    def _reachable(cls, value: list[str]) -> list[str]:
        for server in value:
            if not re.match(r"https?://[^/]", server):
                raise ValueError(f"{server!r} is no address of a server, as http://127.0.0.1:8000 is")
        return value

    @field_validator("weights")
    @classmethod
    def _servers_take_it(cls, value: str, info: ValidationInfo) -> str:
        servers = info.data.get("servers")
        if value == "file" and servers:
            raise ValueError("servers take no files; leave it out, or choose nccl or gloo")
        if value in ("nccl", "gloo") and not servers:
            raise ValueError(f"{value} is for servers: name them in generator.servers, or leave it out")
        return value


class SandboxesConfig(Section):
    """Where sandboxes come from."""

    address: str = Field(default_factory=lambda: os.environ.get("SANDBOXD_ADDRESS", ""))
    """A running daemon, `unix:/path` or `host:port`; by default `SANDBOXD_ADDRESS`. When empty the run starts
    a daemon of its own."""
    pool: str = "python"
    """The pool to lease from; its sandboxes must hold `python3`."""
    backend: Literal["namespace", "docker", "fake"] = "namespace"
    """Backend of the run's own daemon."""
    image: str | None = None
    """Image for the run's own daemon; the host's system directories when unset (namespace only)."""
    warm: Annotated[int, Field(ge=0)] = 16
    """Sandboxes that the run's own daemon keeps ready."""
    ttl_seconds: Seconds = 120.0
    """Lease; renewed while the episode lasts."""
    timeout_seconds: Seconds = 60.0
    """The longest wait for a lease."""


class HeldOutConfig(Section):
    """What is measured before and after training."""

    per_kind: Count = 16
    """Problems of each benchmark kind."""
    per_level: Count = 2
    """Problems of each family and level in the fixed mix."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Also measure after so many steps; never when 0."""
    weights_every_steps: Annotated[int, Field(ge=0)] = 0
    """Keep the weights after so many steps, to be measured when the run is over; never when 0."""


class Config(Section):
    """The whole file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Directory of the run under `runs_dir`."""
    runs_dir: Path = Path("runs")
    """Where runs are kept."""
    models_dir: Path = Path("models")
    """Where a packaged model is unpacked once."""
    model: str = "SmolLM2-135M-Instruct"
    """A model directory (config.json, safetensors, a ChatML tokenizer), or the packaged model's name."""
    families: list[str] = Field(default_factory=list)
    """Task families to train on, built-in names or `package.module:Class`; all built-in ones when empty."""
    seed: int = 0
    """Of the tasks and the engine."""
    steps: Count = 30
    """Batches to train."""
    time_limit_seconds: Seconds | None = None
    """Of the whole run, its evaluations included; training stops early enough. No limit when unset."""
    groups_per_batch: Count = 6
    """Groups that one step trains on."""
    samples_per_group: Annotated[int, Field(ge=2, le=1024)] = 8
    """Attempts at each task, compared with one another."""
    concurrent_episodes: Count = 64
    """Episodes that run at once, at most."""
    adapt_concurrency: bool = True
    """Run fewer at once while sandboxes are short or fail, or the engine's cache is full."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the factors in matrix products; auto is bfloat16 where the processors have matrix units for it."""
    staleness_bound: Annotated[int, Field(ge=0, le=64)] = 1
    """How many updates the weights may have moved on since a trained token was drawn; 0 is synchronous."""
    filter: bool = True
    """Choose tasks by solve rate and replace groups without a signal. Off: equal shares, nothing replaced."""
    checkpoint_every_steps: Annotated[int, Field(ge=0)] = 10
    """Save after so many steps; only at the end and at Ctrl-C when 0."""
    checkpoints_kept: Count = 2
    """So many of the newest stay, and the one that scored best on the held-out problems."""
    curriculum: CurriculumConfig = CurriculumConfig()
    queue: Annotated[QueueConfig, Field(validate_default=True)] = QueueConfig()
    trainer: TrainerConfig = TrainerConfig()
    episode: Annotated[EpisodeConfig, Field(validate_default=True)] = EpisodeConfig()
    generator: Annotated[GeneratorConfig, Field(validate_default=True)] = GeneratorConfig()
    sandboxes: SandboxesConfig = Field(default_factory=SandboxesConfig)
    heldout: HeldOutConfig = HeldOutConfig()

    @field_validator("queue")
    @classmethod
    def _queue_fits(cls, value: QueueConfig, info: ValidationInfo) -> QueueConfig:
        samples, bound = info.data.get("samples_per_group"), info.data.get("staleness_bound")
        if samples is not None and value.min_samples > samples:
            raise ValueError(
                f"min_samples is {value.min_samples}, but samples_per_group only {samples}: lower min_samples"
            )
        if value.policy == "in_order" and value.spare_groups:
            raise ValueError(
                f"policy in_order trains every group in its turn, so {value.spare_groups} spare_groups could "
                "never be given up: leave spare_groups out, or choose windowed"
            )
        if value.policy == "drop_late" and bound == 0:
            raise ValueError(
                "policy drop_late needs a staleness_bound of at least 1, for with 0 every batch waits for "
                "all that runs: raise the bound, or choose windowed, with spare_groups if need be"
            )
        return value

    @field_validator("generator")
    @classmethod
    def _takes_adapters(cls, value: GeneratorConfig, info: ValidationInfo) -> GeneratorConfig:
        trainer = info.data.get("trainer")
        if trainer is not None and trainer.lora_rank and value.servers:
            raise ValueError("servers take no adapters: leave out trainer.lora_rank, or the servers")
        return value

    @field_validator("episode")
    @classmethod
    def _turn_fits(cls, value: EpisodeConfig) -> EpisodeConfig:
        if value.turn_tokens >= value.context_tokens:
            raise ValueError("context_tokens must be larger than turn_tokens")
        return value

    @field_validator("episode")
    @classmethod
    def _shaping_fits(cls, value: EpisodeConfig, info: ValidationInfo) -> EpisodeConfig:
        trainer = info.data.get("trainer")
        if trainer is not None and trainer.overlong_tokens > value.sampled_limit:
            raise ValueError(
                f"trainer.overlong_tokens is {trainer.overlong_tokens}, but an episode may sample only "
                f"{value.sampled_limit} tokens: make it smaller"
            )
        return value

    @field_validator("generator")
    @classmethod
    def _weights_fit(cls, value: GeneratorConfig, info: ValidationInfo) -> GeneratorConfig:
        trainer = info.data.get("trainer")
        if trainer is not None and trainer.backend == "fake" and value.backend != "fake":
            raise ValueError("a fake trainer has no weights for it: set generator.backend to 'fake', too")
        return value

    @property
    def advantage_rule(self) -> AdvantageRule:
        """How the rewards of a group are compared."""
        return AdvantageRule(
            by_deviation=RECIPES[self.trainer.loss].by_deviation,
            overlong_tokens=self.trainer.overlong_tokens,
            limit_tokens=self.episode.sampled_limit,
        )

    @property
    def directory(self) -> Path:
        """Where this run keeps everything."""
        return self.runs_dir / self.name

    def as_toml(self) -> str:
        """The settings as a file that reads back to the same."""
        values = self.model_dump(mode="json")
        sections = {key: value for key, value in values.items() if isinstance(value, dict)}
        lines = [_toml_line(key, value) for key, value in values.items() if key not in sections]
        for name, section in sections.items():
            lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in section.items())]
        return "\n".join(line for line in lines if line is not None) + "\n"


def _toml_line(key: str, value: Any) -> str | None:
    """None is what a key has when it is left out; JSON writes all other values here as TOML does."""
    return None if value is None else f"{key} = {json.dumps(value)}"


def endpoint_key() -> str | None:
    """The key of an OpenAI-compatible endpoint, from OPENAI_API_KEY."""
    return os.environ.get("OPENAI_API_KEY") or None


def metrics_protocol() -> str | None:
    """How OpenTelemetry metrics are exported; None when they are not. Raises ConfigError."""
    return protocol("metrics", os.environ)


def traces_protocol() -> str | None:
    """How OpenTelemetry spans are to be exported; None when the OTEL_ variables ask for none. Raises
    ConfigError.
    """
    return protocol("traces", os.environ)


def load(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """Reads a settings file (none: all defaults); `overrides` that are not None win over it.

    Raises ConfigError with one line that names the file, the key, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    values |= {key: value for key, value in overrides.items() if value is not None}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path or 'settings'}: {explain(error, Config)}") from error
