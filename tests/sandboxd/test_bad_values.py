"""Values that no call can carry, and addresses that are none: one line that names them, and nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandboxd import Box, Client, SyncClient, cli, errors

from .conftest import daemon_process, files_up_to

FAKE = '[pools.python]\nbackend = "fake"\nwarm = 1\nsize_limit = 6\n'


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with daemon_process(tmp_path_factory.mktemp("bad"), FAKE) as address:
        yield address


VALUES: dict[str, tuple[Callable[[Client], Awaitable[object]], str]] = {
    "a wait that is no number": (
        lambda client: leased(client.acquire("python", timeout=math.nan)),
        "timeout = nan s is no number",
    ),
    "an endless lease": (
        lambda client: leased(client.acquire("python", ttl=math.inf)),
        "ttl = inf s must be at most 1e+07 s",
    ),
    "a priority of too many bits": (
        lambda client: leased(client.acquire("python", priority=1 << 40)),
        "priority = 1099511627776",
    ),
    "a gang of too many bits": (
        lambda client: leased(client.acquire_gang("python", 1 << 40)),
        "count = 1099511627776",
    ),
    "a name that is no Unicode": (lambda client: client.get_pool("\udcff"), "name = 'pools/\\udcff'"),
    "a tenant's pool that is no Unicode": (lambda client: client.list_tenants("\ud800"), "pool = 'pools/"),
    "a word that is no text": (
        lambda client: within(client, lambda box: box.exec(["echo", "a\ud800"])),
        "'\\ud800' at 1 of 'a\\ud800' is no character: leave it out, or give bytes",
    ),
    "a path that is no text": (
        lambda client: within(client, lambda box: box.read_file("\ud800")),
        "'\\ud800' at 0 of '\\ud800' is no character",
    ),
    "a tree for a path that is no text": (
        lambda client: within(client, lambda box: box.upload_tree(Path("/none"), "\ud800")),
        "'\\ud800' at 0 of '\\ud800' is no character",
    ),
    "a tree of no path": (
        lambda client: within(client, lambda box: box.upload_tree(Path("a\0b"), "x")),
        "path b'a\\x00b' must not contain a zero byte",
    ),
    "a tree for no path": (
        lambda client: within(client, lambda box: box.download_tree("x", Path("\ud800"))),
        "'\\ud800' at 0 of '\\ud800' is no character",
    ),
    "a command of no name": (
        lambda client: within(client, lambda box: box.start(["true"], command_id="\ud800")),
        "command_id = '\\ud800'",
    ),
    "a name of no command": (
        lambda client: within(client, lambda box: box.command("\ud800").forget()),
        "command_id = '\\ud800'",
    ),
    "code that is no text": (
        lambda client: within(client, lambda box: ran(box, "echo \ud800")),
        "'\\ud800' at 5 of 'echo \\ud800' is no character",
    ),
    "a target of too many bits": (
        lambda client: client.update_pool("python", warm=1 << 40),
        "warm_count_target = 1099511627776",
    ),
    "a limit of nothing": (
        lambda client: client.update_pool("python", size_limit=0),
        "size_limit 0 must be from 1 to",
    ),
    "a limit beyond all": (
        lambda client: client.update_pool("python", size_limit=99_999_999),
        "size_limit 99999999 must be from 1 to",
    ),
    "demand at no time": (lambda client: client.prewarm("python", 1, by=math.nan), "by = nan s"),
    "demand after the end of time": (lambda client: client.prewarm("python", 1, by=1e300), "by = 1e+300 s"),
    "a watch that never looks": (lambda client: watched(client, math.inf), "interval = inf s"),
    "a command without end": (
        lambda client: within(client, lambda box: box.exec(["true"], timeout=math.inf)),
        "timeout = inf s must be at most 1e+07 s",
    ),
    "a line where words are wanted": (
        lambda client: within(client, lambda box: box.exec("echo hi")),
        "argv = 'echo hi' is one word: give a list of words, or ['sh', '-c', 'echo hi']",
    ),
    "input larger than a message": (
        lambda client: within(client, lambda box: box.exec(["cat"], stdin=bytes(5 << 20))),
        "the message is larger than the daemon takes (",
    ),
    "an offset of too many bits": (
        lambda client: within(client, lambda box: box.read_file("x", offset=1 << 70)),
        f"offset = {1 << 70}",
    ),
    "a mode below nothing": (
        lambda client: within(client, lambda box: box.write_file("x", b"", mode=-1)),
        "mode = -1",
    ),
}


async def leased(acquisition: Awaitable[object]) -> object:
    return await acquisition


async def watched(client: Client, interval: float) -> object:
    return await anext(client.watch_pool("python", interval=interval))


async def ran(box: Box, code: str) -> object:
    async with box.shell() as shell:
        return await shell.run(code)


async def within(client: Client, use: Callable[..., Awaitable[object]]) -> object:
    async with client.acquire("python", timeout=30) as box:
        return await use(box)


@pytest.mark.anyio
async def test_a_value_that_no_call_can_carry_is_named(address: str) -> None:
    async with asyncio.timeout(50), Client(address) as client:
        for what, (call, words) in VALUES.items():
            with pytest.raises(errors.InvalidRequest) as raised:
                await call(client)
            assert words in str(raised.value), what
            assert "\n" not in str(raised.value), what
        # A deadline too late for gRPC was one that had passed.
        for seconds in (math.inf, 1e300):
            async with client.acquire("python", timeout=seconds) as box:
                assert (await box.exec(["echo", "hi"])).stdout == b"hi\n"


@pytest.mark.anyio
async def test_a_path_deeper_than_pythons_stack_is_no_fault_of_the_daemon(address: str) -> None:
    """And one that it makes is no broken connection: what was sent meanwhile hid it."""
    async with asyncio.timeout(50), Client(address) as client, client.acquire("python") as box:
        with pytest.raises(errors.FileFailed, match="ENAMETOOLONG"):
            await box.write_file("d/" * 3000, b"x")
        assert await box.write_file("e/" * 1500 + "file", b"x") == 1
        assert await box.read_file("e/" * 1500 + "file") == b"x"
        with pytest.raises(errors.FileFailed, match="nested deeper than the fake backend copies"):
            async with box.fork(1):
                raise AssertionError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nonsense", "an address is unix:/path or host:port"),
        ("unix:", "an address is unix:/path or host:port"),
        ("host:", "an address is unix:/path or host:port"),
        ("127.0.0.1:99999", "a port is a number from 0 to 65535"),
        ("127.0.0.1:" + "9" * 5000, "a port is a number from 0 to 65535"),
        ("127.0.0.1:\u0663", "an address is unix:/path or host:port"),
        ("unix:/tmp/\udcff", "it must be text in UTF-8, without a zero byte"),
        ("host\ud800:80", "it must be text in UTF-8, without a zero byte"),
        ("dns:///\ud800:80", "it must be text in UTF-8, without a zero byte"),
        # gRPC would take it for unix:/tmp/a.
        ("unix:/tmp/a\0b", "it must be text in UTF-8, without a zero byte"),
        ("unix:/" + "x" * 200, "the path of a unix socket has at most 107 bytes"),
    ],
)
def test_an_address_that_is_none_is_named(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.InvalidRequest, match=words):
        Client(given)
    with pytest.raises(errors.InvalidRequest, match=words):
        SyncClient(given)
    assert cli.main(["ls", "--address", given]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["exec", "--wait", "nan", "python", "--", "true"],
            2,
            "exec --wait nan: must be a number of seconds",
        ),
        (["exec", "--wait", "-1", "python", "--", "true"], 2, "exec --wait -1: must be a number of seconds"),
        (["pool", "set", "python", "--warm", "99999999999999"], 1, "warm_count_target = 99999999999999"),
        (["prewarm", "python", "5", "--by", "nan"], 2, "prewarm --by nan: must not be negative"),
        (["prewarm", "python", "5", "--by", "1e300"], 1, "by = 1e+300 s"),
        (["prewarm", "python", "99999999999"], 1, "count = 99999999999"),
        (["prewarm", "python", "0"], 2, "name it with --id"),
        (["ls", "--pool", "\udcff"], 1, "pool = 'pools/\\udcff'"),
    ],
)
def test_a_bad_value_on_the_command_line_is_one_line(
    address: str, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = 2 if arguments[0] == "pool" else 1
    assert cli.main([*arguments[:at], "--address", address, *arguments[at:]]) == code
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ramp", "--from", "nan"], "nan callers a second"),
        (["ramp", "--from", "-1"], "-1 callers a second"),
        (["ramp", "--to", "1e12"], "callers are more than 1000000"),
        (["poisson", "--rate", "inf"], "inf callers a second"),
        (["churn", "--seconds", "0"], "--seconds 0: must be above 0"),
        (["churn", "--seconds", "nan"], "--seconds nan: must be above 0"),
        (["bombs", "--seconds", "-1"], "--seconds -1: must be above 0"),
        (["chaos", "--kills", "-1"], "--kills -1: must be at least 0"),
        (["burst", "--start-limit", "0"], "--start-limit 0: must be from 1 to 1024"),
        (
            ["burst", "--count", "99999999"],
            "99999999 sandboxes at once are more than a pool may have: 100000",
        ),
    ],
)
def test_a_load_that_cannot_be_put_is_refused_before(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "{}", "--name", "x"], "no file; give an archive"),
        (["import", "", "--name", "x"], "source '' names nothing"),
        (["import", "docker:", "--name", "x"], "source 'docker:' names nothing"),
        (["import", "docker:\udcff", "--name", "x"], "an image's name is text in UTF-8"),
        (["import", "{}/text", "--name", "x"], "is not a tar archive, or a damaged one; give"),
    ],
)
def test_what_is_no_image_is_named_in_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("hello\n")
    given = [each.format(tmp_path) for each in arguments]
    assert cli.main(["image", *given, "--images-dir", str(tmp_path / "images")]) == 1
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("option", ["--state-dir", "--config"])
def test_an_empty_path_is_not_this_directory(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a shell makes of a variable that is not set."""
    with pytest.raises(SystemExit) as raised:
        cli.main(["serve", option, ""])
    assert raised.value.code == 2
    assert f"argument {option}: the path is empty" in capsys.readouterr().err


def test_a_file_whose_name_is_no_text_is_told_all_the_same(tmp_path: Path) -> None:
    """Standard output is not one that takes any text by itself, as it is in some languages."""
    archive, store = tmp_path / "a\udcff.tar", str(tmp_path / "images")
    with tarfile.open(archive, "w") as tar:
        tar.add("/etc/hostname", "etc/hostname")
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for words in (["import", str(archive), "--name", "x"], ["ls"]):
        run = command("image", *words, "--images-dir", store)
        done = subprocess.run(run, env=strict, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    assert "a\\udcff.tar" in done.stdout


@pytest.mark.parametrize("web", ["h\udcff:0", "a..b:0"])
def test_a_host_that_no_name_can_be_is_one_line(
    tmp_path: Path, web: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake.toml").write_text(FAKE)
    given = ["--config", str(tmp_path / "fake.toml"), "--state-dir", str(tmp_path / "s"), "--web", web]
    assert cli.main(["serve", *given]) == 2
    told = capsys.readouterr().err
    assert told.startswith("sandboxd: ")
    assert f"web = {web!r}" in told
    assert told.count("\n") == 1


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sandboxd", *words]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_exec_that_is_stopped_gives_its_sandbox_back(address: str, number: int) -> None:
    """`timeout 10 sandboxd exec …` must not keep a sandbox for the rest of a lease; nor must input without
    end.
    """
    run, pipe = command("exec", "--address", address, "python", "--", "cat"), subprocess.PIPE
    with subprocess.Popen(command("top", "--json", "--address", address), stdout=pipe) as top:
        assert top.stdout is not None
        active = (json.loads(line)["pools"]["python"]["active"] for line in top.stdout)
        with subprocess.Popen(run, stdin=pipe, stderr=pipe) as process:
            assert process.stderr is not None
            assert next(count for count in active if count) == 1
            process.send_signal(number)
            assert process.stderr.read() == b"sandboxd: interrupted\n"
        assert process.returncode == 1
        assert next(count for count in active if not count) == 0
        top.terminate()


def test_more_input_than_a_command_takes_is_refused(address: str) -> None:
    run = command("exec", "--address", address, "python", "--", "cat")
    with Path("/dev/zero").open("rb") as endless:
        done = subprocess.run(run, stdin=endless, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "sandboxd: exec: standard input is longer than 1048576 bytes; add --interactive\n"


@pytest.mark.anyio
async def test_a_file_of_any_name_writes_no_line_of_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does it colour a terminal; what cannot be copied is named in the error, and in the log."""
    # Larger than what the copying process may write, which inherits the limit.
    large = (
        "import os, resource as r\nr.setrlimit(r.RLIMIT_FSIZE, (-1, -1))\nos.mkdir('x\\nERROR\\x1b[31m')\n"
        "open('x\\nERROR\\x1b[31m/large', 'wb').write(bytes(3 << 20))"
    )
    with contextlib.ExitStack() as stack:
        with files_up_to(2 << 20):
            settings = '[pools.python]\nbackend = "namespace"\nwarm = 0\n'
            address = stack.enter_context(daemon_process(tmp_path, settings))
        async with asyncio.timeout(50), Client(address) as client, client.acquire("python") as box:
            done = await box.exec(["python3", "-c", large])
            assert (done.exit_code, done.stderr) == (0, b"")
            with pytest.raises(errors.StartFailed, match="could not be copied: File too large") as raised:
                async with box.fork(1):
                    raise AssertionError
    log = capfd.readouterr().err
    assert "File too large: workspace/x" in log
    assert not any(line.startswith("ERROR") for line in log.splitlines())
    assert (str(raised.value) + log.replace("\n", "")).isprintable()
