"""The values that flow through the loop: task → episode → group → batch, and why each episode ended.

Nothing here waits, imports torch or knows of a sandbox. Token ids and log-probabilities are typed
arrays (4 bytes a token), because thousands of buffered episodes of Python lists exhaust a host.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    `key` names it for ever (family, level and seed decide it), so that a resumed run can tell which
    problems it has already trained on.
    """

    key: str
    family: str
    level: int
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `[start, end)` of one turn were drawn from weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model sampled in one go, and what the environment answered.

    `sampled_ids` and `logprobs` have the same length; `spans` cover it without gap or overlap.
    `observation_ids` follow the sampled tokens in the context and carry loss mask 0; empty after the
    last turn.
    """

    sampled_ids: TokenIds
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    observation_ids: TokenIds

    def __post_init__(self) -> None:
        if len(self.sampled_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.sampled_ids)} sampled tokens but {len(self.logprobs)} log-probabilities"
            )
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version spans {self.spans} leave a gap or overlap at token {position}")
            position = span.end
        if position != len(self.sampled_ids):
            raise ValueError(f"version spans end at {position}, sampled tokens at {len(self.sampled_ids)}")


class StopReason(enum.StrEnum):
    """Why the model's part of an episode ended."""

    COMPLETED = "completed"
    """The model answered."""
    TOOL_STOPPED = "tool_stopped"
    """The model handed in its code, which ends an episode of such a task."""
    PARSE_ERROR = "parse_error"
    """Its last turn holds a block that is not closed, so it may be a call that cannot be read."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    TIMEOUT = "timeout"
    """A turn, a command or the whole episode outlasted its limit."""
    INTERRUPTED = "interrupted"
    """What the episode stands on failed."""
    GIVEN_UP = "given_up"
    """The loop needed it no more: it was late, or a spare one."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The verifier judged the episode; `reward` is its verdict in [0, 1]."""

    reward: float


@dataclass(frozen=True, slots=True)
class Truncated:
    """The model ran into a limit before it finished; the verifier judged what there was."""

    reason: StopReason
    reward: float


@dataclass(frozen=True, slots=True)
class Unscored:
    """Infrastructure failed, so nothing is known about the model: never a reward, never trained.

    `kind` is the sandboxd error reason, or `GENERATOR`, `VERIFIER` or `TIMEOUT`; `stage` the phase in which
    it struck; `detail` one line for a person.
    """

    kind: str
    stage: str
    detail: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The loop gave the episode up: `timeout`, `late` or `spare`."""

    reason: str


Outcome = Scored | Truncated | Unscored | Cancelled


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task: the turns in order, and how it ended.

    `tool_seconds` is the time spent waiting for the sandbox, `wall_seconds` the whole attempt.
    """

    task: Task
    turns: tuple[Turn, ...]
    outcome: Outcome
    stop_reason: StopReason
    wall_seconds: float = 0.0
    tool_seconds: float = 0.0

    @property
    def reward(self) -> float | None:
        """The verdict, or None where there is none. There is no default reward anywhere."""
        match self.outcome:
            case Scored(reward) | Truncated(_, reward):
                return reward
            case _:
                return None

    @property
    def sampled_count(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)

    @property
    def bytes(self) -> int:
        """What its arrays take."""
        arrays = [(turn.sampled_ids, turn.logprobs, turn.observation_ids) for turn in self.turns]
        return sum(array.nbytes for turn in arrays for array in turn)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled any token of the episode; None when nothing was sampled."""
        versions = [span.version for turn in self.turns for span in turn.spans]
        return min(versions) if versions else None


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that are compared with one another. They share `prompt_ids`."""

    task: Task
    prompt_ids: TokenIds
    episodes: tuple[Episode, ...]

    @property
    def bytes(self) -> int:
        """What its arrays take."""
        return self.prompt_ids.nbytes + sum(episode.bytes for episode in self.episodes)

    @property
    def scored(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.reward is not None)

    @property
    def solve_rate(self) -> float | None:
        """Mean reward of the scored episodes; None when infrastructure left none."""
        rewards = [episode.reward for episode in self.scored]
        return float(np.mean([r for r in rewards if r is not None])) if rewards else None

    @property
    def oldest_version(self) -> int | None:
        versions = [v for v in (episode.oldest_version for episode in self.scored) if v is not None]
        return min(versions) if versions else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode ready to train on: its advantage and its tokens after the shared prompt.

    `ids`, `loss_mask` and `logprobs` have one entry a token; `loss_mask` is True for sampled tokens
    only, and `logprobs` is NaN where it is False, so that a missing value can never pass for a
    probability of one.
    """

    ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    logprobs: LogProbs
    advantage: float


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group as the trainer wants it: the prompt once, then each sample after it."""

    task_key: str
    prompt_ids: TokenIds
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimiser step trains on. `step` counts from 1; staleness is in weight versions."""

    step: int
    groups: tuple[PackedGroup, ...]

    @property
    def trained_count(self) -> int:
        """Tokens that carry a loss."""
        return sum(int(sample.loss_mask.sum()) for group in self.groups for sample in group.samples)

    @property
    def sample_count(self) -> int:
        return sum(len(group.samples) for group in self.groups)

    @property
    def unshared_count(self) -> int:
        """Tokens that a forward pass would take with every sample behind a prompt of its own."""
        return sum(
            len(group.prompt_ids) + len(sample.ids) for group in self.groups for sample in group.samples
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did. All values are finite, or the step raised instead."""

    step: int
    loss: float
    grad_norm: float
    trained_tokens: int
    forwarded_tokens: int
    unshared_tokens: int
    mean_ratio: float
    clipped_fraction: float
    mismatch_kl: float
    train_seconds: float
    extra: dict[str, float] = field(default_factory=dict)
