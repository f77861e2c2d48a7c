"""Files and trees through a real daemon on a real socket, over the fake backend."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import Client, FileKind, errors

from .conftest import daemon_process
from .test_recovery import pid_of

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]


async def test_files_travel_whole(daemon: OpenDaemon) -> None:
    content = bytes(range(256)) * 5000
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        assert await box.write_file("deep/data.bin", content, mode=0o600) == len(content)
        assert await box.read_file("deep/data.bin") == content
        assert await box.read_file("deep/data.bin", offset=3, limit=4) == bytes([3, 4, 5, 6])
        listed = await box.exec(["stat", "-c", "%a", "deep/data.bin"])
        assert listed.stdout == b"600\n"
        with pytest.raises(errors.FileNotFound, match="none") as raised:
            await box.read_file("none")
        assert raised.value.cause is errors.Cause.TASK


PIECE, PIECES = os.urandom(1 << 20), 96


def most_memory(pid: int, *, anew: bool = False) -> int:
    """The peak of a process's resident bytes, from now on where it begins `anew`."""
    if anew:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


async def test_a_large_file_is_held_by_nobody_whole(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(PIECES):
            yield PIECE

    settings = "drain_seconds = 0.2\n[pools.python]\nwarm = 1\nlimits.memory_bytes = 268435456\n"
    with daemon_process(tmp_path, settings) as address:
        async with Client(address) as client, client.acquire("python", timeout=60) as box:
            daemon = int((tmp_path / "state" / "daemon.lock").read_text())
            guest = await pid_of(box)
            before = {pid: most_memory(pid, anew=True) for pid in (daemon, guest)}
            assert await box.write_file("large", pieces()) == PIECES * len(PIECE)
            size, hashed = 0, hashlib.sha256()
            async for piece in box.read_pieces("large"):
                size += len(piece)
                hashed.update(piece)
            assert (size, hashed.digest()) == (PIECES << 20, hashlib.sha256(PIECE * PIECES).digest())
            grown = {pid: most_memory(pid) - most for pid, most in before.items()}
            assert grown[daemon] < 64 << 20
            assert grown[guest] < 8 << 20
            part = [piece async for piece in box.read_pieces("large", offset=5, limit=7)]
            assert b"".join(part) == PIECE[5:12]


async def test_files_are_described_listed_and_removed(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        for number in range(1100):
            await box.write_file(f"many/{number:04}", b"x" * number)
        assert [file.name for file in await box.list_files("many")] == [b"%04d" % n for n in range(1100)]
        described = await box.stat_file("many/0007")
        assert (described.kind, described.size, described.mode) == (FileKind.FILE, 7, 0o644)
        with pytest.raises(errors.FileFailed, match="ENOTEMPTY"):
            await box.remove_file("many")
        await box.remove_file("many", recursive=True)
        assert await box.list_files() == []
        with pytest.raises(errors.FileNotFound, match="many"):
            await box.stat_file("many")


async def test_trees_travel_both_ways(daemon: OpenDaemon, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "large").write_bytes(os.urandom(5_000_000))
    (source / "program").write_text("#!/bin/sh\necho ran\n")
    (source / "program").chmod(0o755)
    (source / "link").symlink_to("sub/large")
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        assert await box.upload_tree(source, "here") == 5
        assert (await box.exec(["./program"], cwd="here")).stdout == b"ran\n"
        await box.download_tree("here", target)
        assert (target / "link").read_bytes() == (source / "sub" / "large").read_bytes()
        assert os.access(target / "program", os.X_OK)
        await box.exec(["ln", "-s", "/etc/passwd", "here/trap"])
        with pytest.raises(errors.FileFailed, match="trap"):
            await box.download_tree("here", tmp_path / "other")
        assert not (tmp_path / "other" / "trap").exists()
        with pytest.raises(errors.FileNotFound):
            await box.download_tree("nowhere", tmp_path / "none")


async def test_an_upload_that_fails_says_whose_fault_it_was(daemon: OpenDaemon, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(100)
        raise RuntimeError("the caller failed")

    async def stuck() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await asyncio.Event().wait()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000

    async with daemon() as client, client.acquire("python", timeout=10) as box:
        with pytest.raises(RuntimeError, match="the caller failed"):
            await box.upload_archive(broken())
        for _ in range(5):  # the reply comes while data is being sent: either may be noticed first
            with pytest.raises(errors.FileFailed, match="not a tar archive"):
                await box.upload_archive(endless())
        await box.exec(["mkdir", "directory"])
        for _ in range(5):
            with pytest.raises(errors.FileFailed, match="EISDIR"):
                await box.write_file("directory", bytes(20_000_000))
        await box.remove_file("directory")
        with pytest.raises(OSError, match="nowhere"):
            await box.upload_tree(tmp_path / "nowhere")
        async with asyncio.timeout(20):  # a source that falls silent holds up no error
            with pytest.raises(errors.FileFailed, match="not a tar archive"):
                await box.upload_archive(stuck())
        assert await box.list_files() == []


async def test_a_list_may_be_longer_than_a_message(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        make = "import os\nfor n in range(1500): os.symlink('t' * 4000, f'{n:04}')"
        assert (await box.exec(["python3", "-c", make])).ok
        assert [file.name for file in await box.list_files()] == [b"%04d" % number for number in range(1500)]


async def test_many_downloads_at_once_wait_for_no_thread(daemon: OpenDaemon, tmp_path: Path) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        await box.write_file("tree/f", os.urandom(1_000_000))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in range(40):
                tasks.create_task(box.download_tree("tree", tmp_path / str(number)))
        assert len({(tmp_path / str(number) / "f").read_bytes() for number in range(40)}) == 1


async def test_a_transfer_that_is_given_up_is_over_at_once(daemon: OpenDaemon, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(200_000_000))
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await box.upload_tree(tmp_path)
        await box.exec(["truncate", "-s", "300M", "many"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await box.download_tree(".", tmp_path / "target")
        assert (await box.exec(["true"])).ok
