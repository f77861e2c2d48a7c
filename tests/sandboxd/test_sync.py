"""The client for code without asyncio, against a daemon in a process of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sandboxd import Exited, Started, Stdout, SyncClient, errors
from sandboxd.child import child_daemon

pytestmark = pytest.mark.anyio


async def test_the_same_calls_without_asyncio(tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text('[pools.python]\nbackend = "fake"\nwarm = 1\n')
    async with child_daemon(tmp_path / "state", config=config) as address:
        use(address)


async def test_a_directory_whose_path_is_too_long_for_an_address(tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text('[pools.python]\nbackend = "fake"\nwarm = 1\n')
    state = tmp_path / ("long" * 30)
    async with child_daemon(state, config=config) as address:
        assert (state / "sandboxd.sock").is_socket()
        with SyncClient(address) as client, client.acquire("python", timeout=30) as box:
            assert box.exec(["echo", "hi"]).stdout == b"hi\n"
    assert not (state / "sandboxd.sock").exists()


def test_a_client_that_cannot_be_opened_says_so() -> None:
    client = SyncClient("unix:/none")
    # What gRPC refuses; no address that is checked before is of that kind.
    client._offered.address = "dns:\udcff"
    with pytest.raises(UnicodeEncodeError), client:
        pass
    assert "sandboxd client" not in [thread.name for thread in threading.enumerate()]


def use(address: str) -> None:
    with SyncClient(address) as client:
        with client.acquire("python", timeout=30) as box:
            assert box.exec(["echo", "hi"]).stdout == b"hi\n"
            assert box.write_file("a", b"data") == 4
            assert box.read_file("a") == b"data"
            started = box.start(["sh", "-c", "printf one; exit 3"])
            assert (started.wait().stdout, started.wait().exit_code) == (b"one", 3)
            events = list(box.attach(started.id, stdout_offset=1))
            assert [type(event) for event in events] == [Started, Stdout, Exited]
            assert events[1] == Stdout(b"ne", 1)
            assert [info.id for info in box.list_commands()] == [started.id]
            endless = box.start(["sleep", "1000"], command_id="endless")
            endless.signal(15)
            assert box.command("endless").wait().signal == 15
            started.forget()
            with pytest.raises(errors.CommandNotFound):
                started.wait()
            with box.shell() as shell:
                assert shell.run("word=kept").ok
                assert shell.run("sleep 100", timeout=0.2).timed_out
                assert shell.run("echo $word").stdout == b"kept\n"
            with box.python() as python, pytest.raises(ZeroDivisionError):
                assert python.run("6 * 7").stdout == b"42\n"
                raise ZeroDivisionError
        assert client.get_pool("python").released_total == 1
        with client.acquire_gang("python", 2, timeout=30, tenant="b", priority=1) as boxes:
            assert [box.exec(["echo", "hi"]).stdout for box in boxes] == [b"hi\n"] * 2
        with pytest.raises(errors.PoolNotFound), client.acquire("none"):
            pass
