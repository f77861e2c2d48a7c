"""The client for code without asyncio, against a daemon in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd import SyncClient, errors
from sandboxd.child import child_daemon

pytestmark = pytest.mark.anyio


async def test_the_same_calls_without_asyncio(tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text('[pools.python]\nbackend = "fake"\nwarm = 1\n')
    async with child_daemon(tmp_path / "state", config=config) as address:
        use(address)


def use(address: str) -> None:
    with SyncClient(address) as client:
        with client.acquire("python", timeout=30) as box:
            assert box.exec(["echo", "hi"]).stdout == b"hi\n"
            assert box.write_file("a", b"data") == 4
            assert box.read_file("a") == b"data"
            with box.shell() as shell:
                assert shell.run("word=kept").ok
                assert shell.run("sleep 100", timeout=0.2).timed_out
                assert shell.run("echo $word").stdout == b"kept\n"
            with box.python() as python, pytest.raises(ZeroDivisionError):
                assert python.run("6 * 7").stdout == b"42\n"
                raise ZeroDivisionError
        assert client.get_pool("python").released_total == 1
        with pytest.raises(errors.PoolNotFound), client.acquire("none"):
            pass
