"""Docker sandboxes without a guest: the Engine's exec API, on a real Engine and a busybox image."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from sandboxd.backends.docker import DockerBackend
from sandboxd.backends.docker_exec import ExecConnection
from sandboxd.backends.docker_files import ExecFiles
from sandboxd.backends.engine_exec import EngineExec
from sandboxd.errors import FileFailed, FileNotFound, InvalidRequest, SandboxLost
from sandboxd.types import Command, Exited, ExitReason, Started, Stdout, Template
from tests.sandboxd.docker_kit import docker_backend, engine, pieces, run, sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

# The Engine keeps a stream open for 2 s when a background child does; a bound for slow machines.
ENGINE_GRACE_SECONDS = 30.0


@pytest.fixture
async def backend(tmp_path: Path, docker_engine: None) -> AsyncIterator[DockerBackend]:
    async with docker_backend(tmp_path / "docker", tmp_path / "not-built") as opened:
        yield opened


@pytest.fixture
async def box(backend: DockerBackend, docker_busybox_image: str) -> AsyncIterator[ExecConnection]:
    async with sandbox(backend, Template("t", image=docker_busybox_image)) as connection:
        assert isinstance(connection, ExecConnection)
        yield connection


async def test_streams_apart_with_exit_code_and_input(box: ExecConnection) -> None:
    result = await run(box, "sh", "-c", "cat; echo err >&2; pwd; id -u; exit 3", stdin=b"in\0put\n")
    assert (result.stdout, result.stderr) == (b"in\0put\n/workspace\n65534\n", b"err\n")
    assert (result.started, result.code) == (True, 3)


async def test_empty_input_is_an_end_of_file(box: ExecConnection) -> None:
    result = await run(box, "wc", "-c", timeout=20)
    assert (result.stdout.strip(), result.code) == (b"0", 0)


async def test_large_binary_output_and_input(box: ExecConnection) -> None:
    data = bytes(range(256)) * 8192
    result = await run(box, "cat", stdin=data)
    assert result.stdout == data


async def test_a_command_without_output(box: ExecConnection) -> None:
    result = await run(box, "true")
    assert (result.started, result.stdout, result.stderr, result.code) == (True, b"", b"", 0)


async def test_environment_and_directory(box: ExecConnection) -> None:
    result = await run(box, "sh", "-c", 'echo "$A $HOME"; pwd', env={b"A": b"b c"}, cwd=b"/tmp")
    assert result.stdout == b"b c /workspace\n/tmp\n"


@pytest.mark.parametrize(
    ("argv", "cwd", "code"), [("no-such-program", None, 127), ("true", b"/no/such/place", 126)]
)
async def test_what_cannot_be_started(box: ExecConnection, argv: str, cwd: bytes | None, code: int) -> None:
    result = await run(box, argv, cwd=cwd)
    assert (result.exited.reason, result.exited.exit_code) == (ExitReason.NOT_STARTED, code)
    assert not result.started
    assert result.exited.detail


async def test_a_timeout_kills_the_whole_tree(box: ExecConnection) -> None:
    detached = "setsid sh -c 'sleep 987 & sleep 987' & (sleep 987 &) ; sleep 987"
    result = await run(box, "sh", "-c", detached, timeout=0.5)
    assert result.exited.reason is ExitReason.TIMED_OUT
    assert b"sleep 987" not in (await run(box, "ps")).stdout
    assert (await run(box, "echo", "usable")).stdout == b"usable\n"


async def test_output_over_the_limit(box: ExecConnection) -> None:
    result = await run(box, "sh", "-c", "yes", output_limit=1000)
    assert result.exited.reason is ExitReason.OUTPUT_LIMIT_EXCEEDED
    assert result.stdout == b"y\n" * 500
    exact = await run(box, "printf", "12345", output_limit=5)
    assert (exact.stdout, exact.code) == (b"12345", 0)


async def test_leaving_early_kills_the_tree(box: ExecConnection) -> None:
    async with box.exec(Command((b"sh", b"-c", b"echo go; sleep 986"))) as events:
        async for event in events:
            if isinstance(event, Stdout):
                break
    assert b"sleep 986" not in (await run(box, "ps")).stdout


async def test_a_background_child_delays_the_end_by_the_engines_grace(box: ExecConnection) -> None:
    async with asyncio.timeout(ENGINE_GRACE_SECONDS):
        result = await run(box, "sh", "-c", "sleep 60 & echo done")
    assert (result.stdout, result.code) == (b"done\n", 0)


async def test_a_program_that_closes_its_output_and_runs_on(box: ExecConnection) -> None:
    result = await run(box, "sh", "-c", "exec >&- 2>&-; sleep 1; exit 9")
    assert result.code == 9
    assert result.exited.wall >= 1


async def test_a_slow_reader_holds_up_its_own_command_alone(box: ExecConnection) -> None:
    async with box.exec(Command((b"sh", b"-c", b"yes | head -c 50000000"))) as events:
        assert isinstance(await anext(aiter(events)), Started)
        assert (await run(box, "echo", "other")).stdout == b"other\n"
        size = 0
        async for event in events:
            if isinstance(event, Stdout):
                size += len(event.data)
            elif isinstance(event, Exited):
                assert event.reason is ExitReason.EXITED
    assert size == 50_000_000


async def test_files(box: ExecConnection) -> None:
    data = bytes(range(256)) * 1000
    assert await box.files.write(b"a/b/file", pieces(data[:1000], data[1000:]), 0o750) == len(data)
    mode = await run(box, "stat", "-c", "%a", "/workspace/a/b/file")
    assert mode.stdout == b"750\n"
    assert b"".join([piece async for piece in box.files.read(b"/workspace/a/b/file")]) == data
    part = [piece async for piece in box.files.read(b"a/b/file", offset=10, limit=20)]
    assert b"".join(part) == data[10:30]
    assert await box.files.write(b"a/b/file", pieces(), 0o600) == 0
    assert [piece async for piece in box.files.read(b"a/b/file")] == []


async def test_files_that_cannot_be(box: ExecConnection) -> None:
    with pytest.raises(FileNotFound):
        async for _ in box.files.read(b"missing"):
            pass
    with pytest.raises(FileFailed, match="directory"):
        async for _ in box.files.read(b"/tmp"):
            pass
    with pytest.raises(FileFailed, match="directory"):
        await box.files.write(b"/tmp", pieces(b"x"), 0o600)
    with pytest.raises(FileFailed):
        await box.files.write(b"/proc/nowhere/x", pieces(b"x"), 0o600)
    with pytest.raises(InvalidRequest, match="UTF-8"):
        await box.files.write(b"\xff", pieces(b"x"), 0o600)


async def test_a_source_that_fails_replaces_nothing(box: ExecConnection) -> None:
    await box.files.write(b"kept", pieces(b"old"), 0o600)

    async def failing() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        await box.files.write(b"kept", failing(), 0o600)
    assert [piece async for piece in box.files.read(b"kept")] == [b"old"]
    assert (await run(box, "ls", "-A", "/workspace")).stdout == b"kept\n"


async def test_a_source_that_fails_before_its_program_works(box: ExecConnection) -> None:
    delays = iter(["1", "0"])  # what takes the data, what takes it away again

    def start(argv: list[str]) -> Awaitable[EngineExec]:
        delay = next(delays)
        order = f'sleep {delay}; "$@"; code=$?; echo {delay} >>ended; exit $code'
        return box.start(["sh", "-c", order, "sh", *argv])

    async def failing() -> AsyncIterator[bytes]:
        raise RuntimeError("the source broke")
        yield b""

    with pytest.raises(RuntimeError, match="the source broke"):
        await ExecFiles(start).write(b"kept", failing(), 0o600)
    assert (await run(box, "cat", "ended")).stdout == b"1\n0\n"
    assert (await run(box, "ls", "-A", "/workspace")).stdout == b"ended\n"


async def test_the_temporary_directory_is_open(box: ExecConnection) -> None:
    """The image's own is root's, mode 0755."""
    mode = await run(box, "sh", "-c", "stat -c %a /tmp && touch /tmp/a && ls /tmp")
    assert mode.stdout == b"1777\na\n"


async def test_named_commands_are_refused(box: ExecConnection) -> None:
    with pytest.raises(InvalidRequest, match="make guest"):
        await run(box, "true", id="it")
    with pytest.raises(InvalidRequest, match="make guest"):
        await box.commands.forget("it")
    assert await box.commands.known() == []


async def test_the_containers_end_is_noticed(box: ExecConnection, backend: DockerBackend) -> None:
    lost = asyncio.create_task(box.wait_lost())
    async with box.exec(Command((b"sh", b"-c", b"echo go; sleep 985"))) as events:
        with pytest.raises(SandboxLost):
            async for event in events:
                if isinstance(event, Stdout):
                    async with engine() as host:
                        await host.call(lambda api: api.kill(backend._name("one")))
    assert "status 137" in await asyncio.wait_for(lost, 20)
    with pytest.raises(SandboxLost):
        await box.ping()
    with pytest.raises(SandboxLost):
        await run(box, "true")
