"""docs/rl_failures.md names a test for each failure of other loops; those that no other file has are here."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from rl.types import Turn, VersionSpan
from tests.rl.harness import Rig

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \|.*\| (.*) \|$", re.MULTILINE)
NAMED = re.compile(r"([\w/]+\.py)::(test_\w+)")


def test_every_failure_has_tests_that_exist() -> None:
    rows = ROW.findall((ROOT / "docs" / "rl_failures.md").read_text())
    assert [int(number) for number, _ in rows] == list(range(1, 33))
    for number, cell in rows:
        tests = NAMED.findall(cell)
        assert tests, number
        for file, name in tests:
            source = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), (number, file, name)


def test_tokens_newer_than_the_step_end_the_run(tmp_path: Path) -> None:
    """A generator that claims weights which the loop has not given it must not be trained on."""

    class Swapping(asyncio.Event):
        """The first request finds the weights changed behind the loop's back."""

        async def wait(self) -> Literal[True]:
            if rig.generator.version == 0:
                await rig.generator.update_weights(tmp_path / "model", 5)
            return True

    rig = Rig(tmp_path, gate=Swapping, concurrent=1)
    with pytest.raises(ValueError, match="newer than 0"):
        asyncio.run(rig.loop.run())
    assert rig.trainer.batches == []


def test_a_turn_with_a_logprob_too_few_is_refused() -> None:
    ids = np.array([1, 2, 3], np.int32)
    with pytest.raises(ValueError, match="2 log-probabilities"):
        Turn(ids, np.zeros(2, np.float32), (VersionSpan(0, 0, 3),), ids[:0])
