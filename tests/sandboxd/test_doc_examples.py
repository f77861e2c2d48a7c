"""The examples of the protocol's page do what they say, word for word, against a daemon."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parent.parent.parent / "docs" / "protocol.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_runs(daemon: Callable[..., Any], number: int) -> None:
    async with daemon() as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            EXAMPLES[number],
            env={**os.environ, "SANDBOXD_ADDRESS": client.address},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert output


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
