"""How an episode is written in tokens: the prompt, the model's turns, and what the sandbox answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rl.types import TokenIds

FENCE = "```"
STOP_TEXTS = (f"{FENCE}\n",)
"""A turn ends right after a closed block; the opening fence never matches, since it names its language."""
FIRST_STOP_TEXTS = (FENCE,)
"""A first turn that begins inside a block is closed by its first fence: nothing need be sampled behind."""


class Tokenizer(Protocol):
    """The part of a tokenizer that is used; `encode` adds no special tokens of its own."""

    @property
    def end_of_turn(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Shot:
    """A worked example: the turns in order, the user's and the model's by turns."""

    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """The instruction, the worked examples, and how the model's first turn begins: the same for every family.

    `opening` is written for the model, so the first turn is a tool call; later turns begin free.
    """

    system: str
    shots: tuple[Shot, ...]
    opening: str = "```python\n"
    languages: tuple[str, ...] = ("python", "py")
    """What may stand behind the fence of a block that is run; nothing may stand there, too."""


def _shot(question: str, expression: str, output: str) -> Shot:
    code = f"```python\nprint({expression})\n```"
    return Shot((question, code, f"Output: {output}", output))


STYLE = PromptStyle(
    system="Run Python to solve the problem, then reply with the answer only.",
    shots=(
        _shot("What is 15 + 27?", "15 + 27", "42"),
        _shot("Tom has 12 pears and eats 3. How many pears does Tom have now?", "12 - 3", "9"),
        _shot('What does print("planet".upper()) print?', '"planet".upper()', "PLANET"),
    ),
)
"""The examples belong to two of the six benchmark kinds (a two-term sum, with numbers below 100; a
one-step word problem, of a kind that the families do not tell) and to none of the other four."""


class Dialogue:
    """Writes prompts and observations as token ids in the ChatML form, and reads code out of turns."""

    def __init__(
        self, tokenizer: Tokenizer, style: PromptStyle = STYLE, *, begins_turns: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self._begins_turns = begins_turns
        # A chat endpoint begins every turn by itself: nothing can be written for the model there.
        self._style = style if begins_turns else replace(style, opening="")
        named = "|".join(re.escape(language) for language in style.languages)
        self._block = re.compile(rf"```(?:{named})?[ \t]*\n(.*?)```", re.DOTALL)
        self.prefix = self._prefix(style)
        """Ids of all that precedes the question; equal for every task, so it can be computed once."""

    def styled(self, style: PromptStyle) -> Dialogue:
        """The same in another style."""
        return Dialogue(self.tokenizer, style, begins_turns=self._begins_turns)

    def stops(self, *, first: bool) -> tuple[str, ...]:
        """The texts that end a turn."""
        return FIRST_STOP_TEXTS if first and self._style.opening.startswith(FENCE) else STOP_TEXTS

    def find_code(self, text: str) -> str | None:
        """The code of the first closed block in the style's language, or None where there is none."""
        match = self._block.search(text)
        return match.group(1) if match else None

    def prompt(self, question: str) -> TokenIds:
        """The prompt up to where the model's first turn begins, shape (tokens,).

        It always starts with `prefix`, id by id: the two parts are encoded apart.
        """
        opening = self._style.opening
        tail = self.tokenizer.encode(f"{question}<|im_end|>\n<|im_start|>assistant\n{opening}")
        return np.array([*self.prefix, *tail], dtype=np.int32)

    def observation(self, sampled: TokenIds, text: str) -> TokenIds:
        """What follows a turn that called Python: the end of that turn if the model left it
        open, then `text`."""
        ended = len(sampled) > 0 and int(sampled[-1]) == self.tokenizer.end_of_turn
        close = "" if ended else "<|im_end|>"
        text = text.replace("<|", "< |")  # output must not be able to write a turn of its own
        wrapped = f"{close}\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return np.array(self.tokenizer.encode(wrapped), dtype=np.int32)

    def text(self, sampled: TokenIds, *, first: bool) -> str:
        """A sampled turn as text, without the end-of-turn token; the first one with its opening."""
        ids = sampled.tolist()
        if ids and ids[-1] == self.tokenizer.end_of_turn:
            ids.pop()
        return (self._style.opening if first else "") + self.tokenizer.decode(ids)

    def _prefix(self, style: PromptStyle) -> list[int]:
        parts = [f"<|im_start|>system\n{style.system}<|im_end|>\n"]
        for shot in style.shots:
            for index, turn in enumerate(shot.turns):
                role = "user" if index % 2 == 0 else "assistant"
                parts.append(f"<|im_start|>{role}\n{turn}<|im_end|>\n")
        parts.append("<|im_start|>user\n")
        return self.tokenizer.encode("".join(parts))
