"""The Docker backend on a real Engine: the guest inside, what a container may do, what stays behind."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.backends.docker import DockerBackend
from sandboxd.backends.engine import Engine
from sandboxd.backends.native import PROGRAM
from sandboxd.errors import BackendUnavailable, InvalidRequest, Phase, SandboxLost, StartFailed
from sandboxd.types import ExitReason, Limits, Network, Template
from tests.sandboxd.docker_kit import docker_backend, engine, image, labelled, run, sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.fixture
async def backend(tmp_path: Path, docker_engine: None) -> AsyncIterator[DockerBackend]:
    async with docker_backend(tmp_path / "docker") as opened:
        yield opened


@pytest.fixture
def template(docker_python_image: str) -> Template:
    return Template("t", image=docker_python_image)


async def test_a_command_runs_through_the_guest(backend: DockerBackend, template: Template) -> None:
    async with sandbox(backend, template) as box:
        result = await run(box, "python3", "-c", "import os; print(os.getcwd(), os.getuid())")
        assert (result.stdout, result.code) == (b"/workspace 65534\n", 0)
        # The guest says itself how a command ended; the Engine could not.
        killed = await run(box, "sh", "-c", "kill -9 $$")
        assert (killed.exited.reason, killed.exited.signal) == (ExitReason.SIGNALED, 9)


async def test_hardened_by_default(backend: DockerBackend, template: Template) -> None:
    async with sandbox(backend, template) as box:
        status = (await run(box, "cat", "/proc/self/status")).stdout.decode()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"].strip() == "1"
        assert fields["Seccomp"].strip() == "2"
        interfaces = (await run(box, "cat", "/proc/net/dev")).stdout.decode().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        assert (await run(box, "touch", "/workspace/mine", "/tmp/mine")).code == 0
        assert (await run(box, "touch", "/etc/mine")).code != 0
        environment = (await run(box, "env")).stdout.decode()
        assert {line.split("=")[0] for line in environment.splitlines()} <= {
            "HOME",
            "PATH",
            "LANG",
            "PWD",
            "_",
        }


async def test_commands_cannot_reach_the_guest_or_its_socket(
    backend: DockerBackend, template: Template
) -> None:
    async with sandbox(backend, template) as box:
        for attempt in (
            "mv /.sandboxd/run/guest.sock /.sandboxd/run/other",
            "rm -f /.sandboxd/run/guest.sock",
            "ln -s /proc/1/root /.sandboxd/run/link",
            "echo x > /.sandboxd/sandboxd-guest",
            "cat /proc/1/environ",
            "ls /proc/1/fd",
            "kill -9 1; kill -STOP 1; kill -TERM 99999",
        ):
            assert (await run(box, "sh", "-c", attempt)).code != 0, attempt
        await box.ping()


async def test_commands_cannot_talk_to_the_guest(backend: DockerBackend, template: Template) -> None:
    script = (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('/.sandboxd/run/guest.sock')\n"
        "try: s.sendall(b'P\\0\\0\\0\\0'); print(s.recv(5))\n"
        "except OSError as error: print(error.strerror)"
    )
    async with sandbox(backend, template) as box:
        assert (await run(box, "python3", "-c", script)).stdout in (
            b"b''\n",
            b"Broken pipe\n",
            b"Connection reset by peer\n",
        )
        await box.ping()


async def test_only_the_engine_asks_for_the_end(backend: DockerBackend, template: Template) -> None:
    async with sandbox(backend, template) as box:
        assert (await run(box, "sh", "-c", "kill -TERM 1; kill -USR1 1; echo on")).stdout == b"on\n"
        await box.ping()
        lost = asyncio.create_task(box.wait_lost())
        begin = time.monotonic()
        async with engine() as host:
            await host.call(lambda api: api.stop(backend._name("one"), timeout=60))
        assert await asyncio.wait_for(lost, 20) == "its first process ended with status 0"
        assert time.monotonic() - begin < 40, "it was not killed: it ended as it was asked to"


async def test_no_command_escapes_its_end(backend: DockerBackend, template: Template) -> None:
    """By the limits that mark its processes, its own or those of PID 1, or by the key that changes them."""
    tries = """
import ctypes, resource
call = ctypes.CDLL(None, use_errno=True).syscall
limit = (ctypes.c_uint64 * 2)(5, 5)
numbers = {"x86_64": (302, 160, 144), "aarch64": (261, 164, 119)}[__import__("os").uname().machine]
prlimit, setrlimit, schedule = numbers
for number in range(16):
    assert call(prlimit, 1, number, limit, None) == -1, number
assert call(prlimit, 0, resource.RLIMIT_RTTIME, limit, None) == -1
assert call(setrlimit, resource.RLIMIT_RTTIME, limit) == -1
assert call(schedule, 1, 3, limit) == -1
assert call(prlimit, 0, resource.RLIMIT_NOFILE, limit, None) == 0
"""
    async with sandbox(backend, template) as box:
        done = await run(box, "python3", "-c", tries)
        assert (done.code, done.stderr) == (0, b"")
        assert (await run(box, "cat", "/.sandboxd/run/filter")).code == 1
        tree = "(setsid sleep 77 </dev/null >/dev/null 2>&1 &); sleep 60"
        ended = await run(box, "sh", "-c", tree, timeout=0.5)
        assert ended.exited.reason is ExitReason.TIMED_OUT
        assert (await run(box, "sh", "-c", "grep -lx sleep /proc/[0-9]*/comm")).stdout == b""


@pytest.mark.parametrize("held", [b"", b"short", bytes(16), bytes(16 + 7), bytes(24)])
def test_a_filter_that_is_none_is_refused(tmp_path: Path, held: bytes) -> None:
    (tmp_path / "filter").write_bytes(held)
    words = [str(PROGRAM), "container", str(tmp_path / "s"), "ready\n", str(tmp_path / "filter")]
    done = subprocess.run(words, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"sandboxd-guest: %s: " % bytes(tmp_path / "filter"))


async def test_limits_are_enforced(backend: DockerBackend, template: Template) -> None:
    limits = Limits(memory_bytes=64 << 20, pids=20, open_files=64)
    async with sandbox(backend, replace(template, limits=limits)) as box:
        files = await run(box, "sh", "-c", "ulimit -n")
        assert files.stdout == b"64\n"
        spawn = "import subprocess\nfor _ in range(100): subprocess.Popen(['sleep', '60'])"
        assert b"BlockingIOError" in (await run(box, "python3", "-c", spawn, timeout=20)).stderr
        hungry = await run(box, "python3", "-c", "b'x' * (256 << 20)", timeout=30)
        assert hungry.exited.reason is ExitReason.OOM_KILLED
        assert "memory limit" in hungry.exited.detail
        await box.ping()


async def test_host_network_only_when_the_template_says_so(
    backend: DockerBackend, template: Template
) -> None:
    async with sandbox(backend, replace(template, network=Network.HOST)) as box:
        listing = await run(box, "readlink", "/proc/self/ns/net")
        assert listing.stdout.decode().strip() == str(Path("/proc/self/ns/net").readlink())


async def test_the_working_directory_is_made_and_owned(backend: DockerBackend, template: Template) -> None:
    async with sandbox(backend, replace(template, cwd=b"/srv/a/b")) as box:
        result = await run(box, "sh", "-c", "pwd; touch x && echo written")
        assert result.stdout == b"/srv/a/b\nwritten\n"


async def test_a_killed_container_is_noticed(backend: DockerBackend, template: Template) -> None:
    async with sandbox(backend, template) as box:
        lost = asyncio.create_task(box.wait_lost())
        await box.ping()
        async with engine() as host:
            await host.call(lambda api: api.kill(backend._name("one")))
        assert await asyncio.wait_for(lost, 20) == "its first process ended with status 137"
        with pytest.raises(SandboxLost):
            await run(box, "true")
        with pytest.raises(SandboxLost):
            await box.ping()


async def test_destroy_is_idempotent_and_lists_by_instance(
    backend: DockerBackend, template: Template, tmp_path: Path
) -> None:
    await backend.destroy("never-created")
    async with docker_backend(tmp_path / "other") as other:
        await asyncio.gather(*(backend.create(f"s{n}", template) for n in range(3)))
        await other.create("s0", template)
        assert sorted(await backend.list_ids()) == ["s0", "s1", "s2"]
        assert await other.list_ids() == ["s0"]
        await asyncio.gather(backend.destroy("s1"), backend.destroy("s1"))
        await backend.destroy("s1")
        assert sorted(await backend.list_ids()) == ["s0", "s2"]


async def test_the_next_daemon_finds_what_a_killed_one_left(template: Template, tmp_path: Path) -> None:
    killed = DockerBackend(tmp_path / "docker")
    await killed.open()
    await killed.create("orphan", template)
    killed._engine.close()
    async with docker_backend(tmp_path / "docker") as backend:
        assert await backend.list_ids() == ["orphan"]


async def test_a_cancelled_create_leaves_nothing(backend: DockerBackend, template: Template) -> None:
    await backend.prepare(template)
    # Deadlines spread over the length of one start: each phase is struck by some of them.
    outcomes = await asyncio.gather(
        *(_create_within(backend, template, f"c{n}", n * 0.03) for n in range(16))
    )
    assert not all(outcomes)
    assert sorted(await backend.list_ids()) == sorted(f"c{n}" for n, made in enumerate(outcomes) if made)
    directories = {entry.name for entry in backend._state_dir.iterdir()}
    assert directories == {f"c{n}" for n, made in enumerate(outcomes) if made}


async def _create_within(backend: DockerBackend, template: Template, name: str, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await backend.create(name, template)
    except TimeoutError:
        return False
    return True


async def test_a_start_that_takes_too_long_fails_as_ready(backend: DockerBackend, template: Template) -> None:
    with pytest.raises(StartFailed) as caught:
        await backend.create("slow", replace(template, start_timeout=0.001))
    assert caught.value.retryable
    assert "not ready within 0.001 s" in caught.value.message
    assert await backend.list_ids() == []


async def test_an_unknown_runtime_is_not_retried(backend: DockerBackend, template: Template) -> None:
    with pytest.raises(StartFailed) as caught:
        await backend.create("one", replace(template, runtime="no-such-runtime"))
    assert not caught.value.retryable
    assert caught.value.phase is Phase.CREATE
    assert "no-such-runtime" in caught.value.message


async def test_an_image_that_holds_no_program(backend: DockerBackend, docker_engine: None) -> None:
    async with image("empty", {"readme": b"nothing"}) as reference:
        template = Template("t", image=reference)
        async with sandbox(backend, template) as box:
            assert b"".join([piece async for piece in box.files.read(b"/readme")]) == b"nothing"
            missing = (await run(box, "sh")).exited
            assert (missing.reason, missing.exit_code) == (ExitReason.NOT_STARTED, 127)
        # By the Engine alone such a sandbox could not even wait.
        async with docker_backend(backend._state_dir / "other", backend._state_dir / "not-built") as other:
            with pytest.raises(StartFailed) as caught:
                await other.create("one", template)
            assert (caught.value.phase, caught.value.retryable) == (Phase.START, False)
            assert "sh" in caught.value.message
            assert await other.list_ids() == []


async def test_a_first_process_that_dies_leaves_its_last_words(tmp_path: Path, docker_engine: None) -> None:
    busybox = Path("/bin/busybox") if Path("/bin/busybox").exists() else Path("/usr/bin/busybox")
    files = {
        "bin/busybox": busybox.read_bytes(),
        "bin/sh": b"#!/bin/busybox sh\necho no luck today >&2; exit 5\n",
    }
    async with image("broken", files) as reference:
        async with docker_backend(tmp_path / "docker", tmp_path / "not-built") as backend:
            with pytest.raises(StartFailed) as caught:
                await backend.create("one", Template("t", image=reference))
    assert (caught.value.phase, caught.value.retryable) == (Phase.READY, True)
    assert "no luck today" in caught.value.metadata["log"]
    assert "no luck today" in caught.value.message


async def test_a_template_without_image(backend: DockerBackend) -> None:
    with pytest.raises(StartFailed, match="names no image") as caught:
        await backend.prepare(Template("t"))
    assert not caught.value.retryable


async def test_a_name_that_docker_would_not_take(backend: DockerBackend, template: Template) -> None:
    with pytest.raises(InvalidRequest):
        await backend.create("../evil", template)


async def test_close_with_sandboxes_and_images_left(template: Template, tmp_path: Path) -> None:
    backend = DockerBackend(tmp_path / "docker")
    await backend.open()
    await asyncio.gather(*(backend.create(f"s{n}", template) for n in range(4)))
    await backend.close()
    await backend.close()
    assert await labelled(backend._instance) == ([], [])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("unix:///nowhere/docker.sock", ["/nowhere/docker.sock", "No such file", "systemctl start docker"]),
        ("tcp://127.0.0.1:1", ["tcp://127.0.0.1:1", "unix://"]),
    ],
)
async def test_no_engine(url: str, words: list[str], tmp_path: Path) -> None:
    backend = DockerBackend(tmp_path / "docker", engine=Engine(url))
    with pytest.raises(BackendUnavailable) as caught:
        await backend.open()
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message
    await backend.close()
