"""What runs beside a block ends with it, says how it ended, and takes no cancellation but its own."""

from __future__ import annotations

import asyncio

import pytest

from rl.beside import beside


async def forever() -> None:
    await asyncio.Event().wait()


def test_it_runs_for_the_length_of_the_block() -> None:
    seen: list[str] = []

    async def work() -> None:
        seen.append("began")
        try:
            await forever()
        finally:
            seen.append("ended")

    async def body() -> None:
        async with beside(work(), "work"):
            await asyncio.sleep(0)
            assert seen == ["began"]

    asyncio.run(body())
    assert seen == ["began", "ended"]


def test_what_ended_it_early_is_raised_at_the_end_of_the_block() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    async def body() -> None:
        async with beside(work(), "work"):
            await asyncio.sleep(0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(body())


def test_a_cancellation_that_comes_while_it_is_ended_is_not_lost() -> None:
    ending = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            ending.set()
            await asyncio.sleep(0)

    async def block() -> None:
        async with beside(work(), "work"):
            await asyncio.sleep(0)

    async def body() -> None:
        async with asyncio.timeout(20):
            task = asyncio.create_task(block())
            await ending.wait()
            task.cancel()
            await asyncio.wait((task,))
        assert task.cancelled()

    asyncio.run(body())
