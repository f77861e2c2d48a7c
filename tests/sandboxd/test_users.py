"""Commands that name a user, by each door of the daemon: client, sessions, command line; and bad names."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import errors, wire
from sandboxd.backends.docker import DockerBackend
from sandboxd.client import Box, Client
from sandboxd.types import ExitReason, Template
from sandboxd.v1 import sandbox_service_pb2 as pb

pytestmark = pytest.mark.anyio
POOLS = {"plain": {"warm": 1}, "users": {"warm": 1, "users": True, "env": {"A": "b"}}}


def run(client: Client, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "sandboxd", "exec", "--address", client.address, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


async def test_each_door_passes_the_user_on(daemon: Callable[..., Any]) -> None:
    async with daemon(pools=POOLS) as client:
        try:
            async with client.acquire("users", timeout=60) as box:
                await through_the_client(box)
        except errors.StartFailed as error:
            if "users = true needs a daemon that root runs" not in error.message:
                raise
            pytest.skip(error.message)
        told = await asyncio.to_thread(run, client, "--user", "0:12", "users", "--", "id", "-g")
        assert (told.returncode, told.stdout) == (0, b"12\n")
        refused = await asyncio.to_thread(run, client, "-u", "root", "plain", "--", "id")
        assert refused.returncode == 1
        assert b"user 'root': the commands of this sandbox have one user; leave it out, or" in refused.stderr


async def through_the_client(box: Box) -> None:
    done = await box.exec(["sh", "-c", "id -u; echo $HOME $A"], user="root", output_limit=100)
    assert done.stdout == b"0\n/root b\n"
    unknown = await box.exec(["true"], user="nobody-here", output_limit=100)
    assert (unknown.reason, unknown.exit_code) == (ExitReason.NOT_STARTED, 126)
    assert unknown.detail == "user nobody-here: not in /etc/passwd"
    async with asyncio.timeout(30):
        kept = await (await box.start(["id", "-u"], user="4711")).wait()
    assert kept.stdout == b"4711\n"
    async with box.shell(user="root") as shell:
        assert (await shell.run("cd; umask 077; id -u; pwd")).stdout == b"0\n/root\n"
        # Of two users' sessions neither is in the other's way.
        async with box.python(user="1000:1000") as session:
            assert (await session.run("import os; os.getuid()")).stdout == b"1000\n"
        assert (await shell.run("umask")).stdout == b"0077\n"
    assert (await box.exec(["id", "-u"])).stdout == b"1000\n"


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (":", "must be NAME, UID, NAME:GROUP or UID:GID"),
        (":0", "must be NAME, UID, NAME:GROUP or UID:GID"),
        ("root:", "must be NAME, UID, NAME:GROUP or UID:GID"),
        ("0:0:0", "must be NAME, UID, NAME:GROUP or UID:GID"),
        ("a\0b", "must be NAME, UID, NAME:GROUP or UID:GID"),
        ("n" * 257, "at most 256 bytes"),
        ("\u00e4" * 129, "at most 256 bytes"),
        ("65536", "user '65536': 65536 is not from 0 to 65535"),
        ("root:4294967295", "user 'root:4294967295': 4294967295 is not from 0 to 65535"),
        ("9" * 250, "is not from 0 to 65535"),
    ],
)
def test_a_user_that_is_none_is_named(user: str, words: str) -> None:
    with pytest.raises(errors.InvalidRequest) as raised:
        wire.command(pb.ExecCommandRequest(argv=[b"true"], user=user))
    assert words in raised.value.message
    assert len(raised.value.message) < 250


@pytest.mark.parametrize("user", ["", "root", "0", "007:065535", "65535:0", "\u0663", "-1", "n" * 256])
def test_any_other_is_left_to_the_sandbox(user: str) -> None:
    assert wire.command(pb.ExecCommandRequest(argv=[b"true"], user=user)).user == user


async def test_a_container_is_not_even_asked_for(tmp_path: Path) -> None:
    """Before anything of it is pulled or made: this Engine does not answer."""
    backend = DockerBackend(tmp_path / "state")
    template = Template("t", image="x", users=True)
    for asked in (backend.prepare(template), backend.create("one", template)):
        with pytest.raises(errors.StartFailed, match="users = true is for the namespace backend") as raised:
            await asked
        assert not raised.value.retryable
