"""One episode in a process of its own: `python -m tests.rl.traced_episode ADDRESS`. Traced as the OTEL_
variables say, since a program has one provider of spans for good.
"""

from __future__ import annotations

import asyncio
import sys

from rl.config import traces_protocol
from rl.dialogue import Dialogue
from rl.generators.fake import ByteTokenizer, FakeGenerator
from rl.rollout import Limits, Rollout
from rl.sandboxes import DaemonSandboxes
from rl.tracing import exported
from rl.types import Task
from sandboxd import Client

TASK = Task("sums/0/1", "sums", 0, "What is 19 + 23?", "42")


async def play(address: str) -> str:
    turns = ["print(19 + 23)\n```\n", "42"]
    tokenizer = ByteTokenizer()
    with exported(traces_protocol(), "test"):
        async with Client(address) as client:
            rollout = Rollout(
                FakeGenerator(tokenizer, lambda *_: turns.pop(0)),
                DaemonSandboxes(client, "python", ttl=60, timeout=20),
                Dialogue(tokenizer),
                lambda task, answer: float(answer == task.answer),
                limits=Limits(max_turns=3, turn_tokens=200, context_tokens=4000),
            )
            episode = await rollout.run(TASK)
    return str(episode.outcome)


if __name__ == "__main__":
    print(asyncio.run(play(sys.argv[1])))
