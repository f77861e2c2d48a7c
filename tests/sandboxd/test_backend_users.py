"""Commands that name a user, on every backend: who they are then, or why they may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandboxd.backends.base import Connection
from sandboxd.errors import FileFailed, InvalidRequest, StartFailed
from sandboxd.types import Command, ExitReason

from .backend_kit import Case, Outcome, execute, pieces, read, shell
from .namespace_kit import skip_without_users

pytestmark = pytest.mark.anyio
# With a line that is none, one that is cut off, and one whose numbers are none.
PASSWD = "two:x:2:3::/home/two:/bin/sh\nthree:x\n\nfour:x:x:y::/:\nfive:x:5:5\nsix:x:70000:6::/:"
GROUP = "three:x:3:\nseven:x:7:one,two\neight:x:8:two\nnine:x:9:twofold\ntwo:x:x:two\nten:x:70000:"
WHO = "id -u; id -g; id -G; echo $HOME"


WITH_USERS = pytest.mark.parametrize(
    "unopened", ["namespace", pytest.param("namespace-image", marks=pytest.mark.docker)], indirect=True
)


async def test_where_no_command_may_name_a_user_one_line_says_why(case: Case) -> None:
    async with case.sandbox() as box:
        with pytest.raises(InvalidRequest, match="user 'root': the commands of this sandbox have one user"):
            await shell(box, "true", user="root")
        assert (await shell(box, "echo on")).stdout == b"on\n"
    if not case.no_users:
        return
    case.template = replace(case.template, users=True)
    try:
        async with case.sandbox() as box:
            said = await not_started(box, "0")
    except (StartFailed, InvalidRequest) as error:
        said = error.message
    assert case.no_users in said


async def who(box: Connection, user: str) -> list[str]:
    return (await shell(box, WHO, user=user)).stdout.decode().split("\n")[:-1]


async def not_started(box: Connection, user: str, **options: object) -> str:
    outcome: Outcome = await execute(box, Command((b"true",), user=user, **options))  # type: ignore[arg-type]
    assert (outcome.exited.reason, outcome.exited.exit_code) == (ExitReason.NOT_STARTED, 126)
    return outcome.exited.detail


@WITH_USERS
async def test_a_command_is_who_it_names(case: Case) -> None:
    skip_without_users(case.backend)
    case.template = replace(case.template, users=True)
    async with case.sandbox() as box:
        # Before there is any file of users: numbers need none.
        assert (await shell(box, "rm -f /etc/passwd /etc/group", user="0")).code == 0
        assert await who(box, "0") == ["0", "0", "0", "/"]
        assert await who(box, "4711:12") == ["4711", "12", "12", "/"]
        assert await not_started(box, "two") == "user two: not in /etc/passwd"
        files = f"printf '{PASSWD}' >/etc/passwd; printf '{GROUP}' >/etc/group".replace("\n", "\\n")
        assert (await shell(box, files, user="0:0")).code == 0
        assert await who(box, "two") == await who(box, "2") == ["2", "3", "3 7 8", "/home/two"]
        assert await who(box, "002:seven") == await who(box, "two:7") == ["2", "7", "7", "/home/two"]
        assert await who(box, "five") == ["5", "5", "5", "/"]
        assert await who(box, "65535:65535") == ["65535", "65535", "65535", "/"]
        assert (await shell(box, WHO, user="two", env={b"HOME": b"/x"})).stdout.endswith(b"/x\n")
        for user, why in (
            ("nobody-here", "not in /etc/passwd"),
            ("three", "not in /etc/passwd"),
            ("four", "not in /etc/passwd"),
            ("six", "users and groups are from 0 to 65535"),
            ("two:nogroup", "the group is not in /etc/group"),
            ("two:ten", "users and groups are from 0 to 65535"),
        ):
            assert await not_started(box, user) == f"user {user}: {why}"
        # The sandbox's own user is still that.
        assert await who(box, "") == ["1000", "1000", "1000", "/workspace"]


@WITH_USERS
async def test_a_user_has_its_own_streams_terminal_and_directory(case: Case) -> None:
    skip_without_users(case.backend)
    case.template = replace(case.template, users=True)
    async with case.sandbox() as box:
        for user in ("", "0:0", "4711:4711"):
            # By their names, as nginx and many others open their logs: a new right, not the old descriptor.
            again = await shell(
                box, "cat /dev/stdin >/dev/stdout; echo err >/dev/stderr", user=user, stdin=b"in\n"
            )
            assert (again.stdout, again.stderr) == (b"in\n", b"err\n"), user
            on_terminal = await shell(box, "echo own >$(tty); echo tty >/dev/tty", user=user, terminal=(9, 9))
            assert on_terminal.stdout.replace(b"\r", b"") == b"own\ntty\n", user
        own = "umask 077; mkdir /tmp/own; cd /tmp/own; echo mine >file"
        assert (await shell(box, own, user="4711:4711")).code == 0
        inside = await shell(box, "pwd; cat file", user="4711:4711", cwd=b"/tmp/own")
        assert inside.stdout == b"/tmp/own\nmine\n"
        for other in ("", "0:0"):
            said = await not_started(box, other, cwd=b"/tmp/own")
            assert said == "working directory /tmp/own: Permission denied"
        # What the daemon writes and reads is the sandbox's own user's.
        await box.files.write(b"/tmp/file", pieces(b"x"), 0o600)
        assert (await shell(box, "ls -ln /tmp/file")).stdout.split()[2:4] == [b"1000", b"1000"]
        with pytest.raises(FileFailed, match="Permission denied"):
            await read(box, b"/tmp/own/file")
