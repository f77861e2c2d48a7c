"""State directories that are removed while a launcher lives, or after it was killed with its keeper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from sandboxd.backends.launching import end_of
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import BackendUnavailable, StartFailed
from sandboxd.types import Template

from .docker_kit import run
from .namespace_kit import launcher_and_keeper, leftovers, opened

pytestmark = pytest.mark.anyio
TEMPLATE = Template("t")


async def says(backend: NamespaceBackend, name: str) -> bytes:
    """What a command prints in a new sandbox."""
    connection = await backend.create(name, TEMPLATE)
    try:
        return (await run(connection, "echo", name)).stdout
    finally:
        await connection.close()


async def killed_with_its_keeper(state: Path) -> None:
    """Its sandbox's control groups stay; the state directory does not."""
    backend = NamespaceBackend(state)
    await backend.open()
    assert await says(backend, "orphan") == b"orphan\n"
    launcher, keeper = launcher_and_keeper(backend)
    guest = await backend.pid_of("orphan")
    ends = [end_of(pid) for pid in (keeper, launcher, guest)]
    for pid in (keeper, launcher):
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*ends)
    await backend.let_go()
    shutil.rmtree(state)


async def test_groups_of_a_launcher_killed_with_its_keeper_go_at_any_start(tmp_path: Path) -> None:
    async with asyncio.timeout(40), opened(tmp_path / "living") as living:
        await killed_with_its_keeper(tmp_path / "orphan")
        if not living.capabilities().enforced_limits >= {"pids", "cpu"} or not leftovers(tmp_path / "orphan"):
            pytest.skip("no control groups are delegated here")
        async with opened(tmp_path / "next"):
            assert leftovers(tmp_path / "orphan") == []
            # One that has no sandbox at the time looks just as empty.
            assert await says(living, "one") == b"one\n"


async def test_a_directory_that_is_made_anew_has_nothing_to_fear_from_the_launcher_before(
    tmp_path: Path,
) -> None:
    """Without control groups nothing tells the second of the first."""
    options = NamespaceOptions(cgroup_root=tmp_path / "none")
    async with asyncio.timeout(40), contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(opened(tmp_path / "state", options))
        shutil.rmtree(tmp_path / "state")
        second = await stack.enter_async_context(opened(tmp_path / "state", options))
        connection = await second.create("one", TEMPLATE)
        await first.close()
        assert (await run(connection, "echo", "1")).stdout == b"1\n"
        await connection.close()
        assert await says(second, "two") == b"two\n"


async def test_groups_that_a_launcher_still_has_are_not_taken_by_the_next(tmp_path: Path) -> None:
    """It would have taken them away at its end, and no sandbox of the next could have been started."""
    state = tmp_path / "state"
    async with asyncio.timeout(40):
        async with opened(state) as first:
            if not first.capabilities().enforced_limits >= {"pids", "cpu"}:
                pytest.skip("no control groups are delegated here")
            shutil.rmtree(state)
            with pytest.raises(StartFailed, match=r"state directory must stay .* start the daemon anew"):
                await first.create("late", TEMPLATE)
            with pytest.raises(BackendUnavailable, match=r"earlier launcher .* or name another state_dir"):
                await NamespaceBackend(state).open()
            assert await first.list_ids() == []
        async with opened(state) as second:
            assert await says(second, "one") == b"one\n"
    assert leftovers(state) == []


@pytest.mark.parametrize("adopted", [False, True])
async def test_a_launcher_whose_keeper_was_killed_leaves_nothing_either(
    tmp_path: Path, adopted: bool
) -> None:
    """Its parent then is a process that has nothing to do with it, and was waited for."""
    state = tmp_path / "state"
    async with asyncio.timeout(15):
        async with opened(state) as backend:
            assert await says(backend, "one") == b"one\n"
            _, keeper = launcher_and_keeper(backend)
            end = end_of(keeper)
            os.kill(keeper, signal.SIGKILL)
            await end
            if adopted:
                await backend.let_go()
                await backend.open()
            assert await says(backend, "two") == b"two\n"
        assert not state.exists()
    assert leftovers(state) == []
