"""The namespace backend as an ordinary user, in a process that really is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sandboxd
from tests.sandboxd.image_kit import directory, entry, host_programs, tar

NOBODY = 65534
# Loads only what the backend needs: this user may be unable to read the packages of our environment.
PRELUDE = """
import asyncio, contextlib, sys, types
from pathlib import Path
root = Path(sys.argv[1])
for name, path in (("sandboxd", root), ("sandboxd.backends", root / "backends")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(path)]
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import BackendUnavailable, StartFailed
from sandboxd.types import Command, Limits, Template

async def run(box, *argv):
    events = []
    async with box.exec(Command(argv=argv, timeout=20.0)) as stream:
        async for event in stream:
            events.append(event)
    return b"".join(getattr(event, "data", b"") for event in events), events[-1]

@contextlib.asynccontextmanager
async def opened(options=None):
    backend = NamespaceBackend(Path(sys.argv[2]) / "state", options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()
"""


def _pythons() -> list[str]:
    return [os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]


@pytest.fixture
def python() -> str:
    """An interpreter of 3.11 or later that the user may run."""
    for candidate in _pythons():
        check = "import sys; raise SystemExit(sys.version_info < (3, 11))"
        try:
            done = subprocess.run([candidate, "-I", "-S", "-c", check], user=NOBODY, capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    pytest.skip(f"user {NOBODY} can run none of {', '.join(_pythons())} as Python 3.11 or later")


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the user's own, with a copy of the package that it can read."""
    if os.geteuid() != 0:
        return tmp_path_factory.mktemp("user")
    home = Path(subprocess.check_output(["mktemp", "-d"], text=True, user=NOBODY, group=NOBODY).strip())
    source = Path(sandboxd.__file__).parent
    shutil.copytree(source, home / "sandboxd", ignore=shutil.ignore_patterns("__pycache__"))
    return home


def as_user(python: str, home: Path, script: str) -> list[str]:
    """The lines that the script prints; the user's directory is removed."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [python, "-I", "-S", "-c", PRELUDE + textwrap.dedent(script), str(home / "sandboxd"), str(home)],
        cwd="/",
        env={},
        text=True,
        capture_output=True,
        timeout=60,
        **user,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(home)
    return done.stdout.splitlines()


def test_an_ordinary_user_makes_sandboxes(python: str, home: Path) -> None:
    script = """
    async def main():
        async with opened() as backend:
            limits = Limits(pids=12, memory_bytes=256 << 20)
            box = await backend.create("one", Template("t", limits=limits))
            print((await run(box, b"id", b"-u"))[0])
            print((await run(box, b"grep", b"-h", b"Cap", b"/proc/self/status"))[0].split()[1::2])
            print((await run(box, b"unshare", b"--user", b"true"))[1].exit_code)
            # With one number for all, what is root's elsewhere is a sandbox's own here, and nobody else's.
            other = await backend.create("two", Template("t"))
            print((await run(box, b"sh", b"-c", b"echo mine >>/etc/passwd; grep -c mine /etc/passwd"))[0])
            print((await run(other, b"grep", b"-c", b"mine", b"/etc/passwd"))[0])
            try:
                await backend.prepare(Template("t", users=True))
            except StartFailed as error:
                print(error.retryable, error)
            output, end = await run(box, b"sh", b"-c", b"for n in $(seq 40); do sleep 1 & done; wait")
            print(b"fork" in output.lower(), sorted(backend.capabilities().enforced_limits))
            await box.ping()
        print((Path(sys.argv[2]) / "state").exists())
    asyncio.run(main())
    """
    uid, capabilities, unshared, own, others, users, bomb, left = as_user(python, home, script)
    assert users.startswith("False users = true needs a daemon that root runs, a range of users")
    assert [own, others] == ["b'1\\n'", "b'0\\n'"]
    assert uid == "b'1000\\n'"
    assert capabilities == str([b"0" * 16] * 5)
    assert unshared != "0"
    assert bomb.startswith("True [")
    assert "'pids'" in bomb
    assert left == "False"


def test_an_ordinary_user_imports_forks_and_removes(python: str, home: Path) -> None:
    """All files belong to the one user, who must be able to remove them whatever their modes."""
    script = """
    from sandboxd.images.importing import import_image
    from sandboxd.images.store import ImageStore

    async def main():
        home = Path(sys.argv[2])
        store = ImageStore(home / "images")
        image = await import_image(store, str(home / "t.tar"), "t", print)
        async with opened(NamespaceOptions(images_dir=store.root)) as backend:
            for name in (None, "t"):
                template = Template("t", image=name)
                box = await backend.create("one", template)
                await run(box, b"sh", b"-c", b"mkdir -p d/e; echo x > d/e/f; chmod 0 d/e/f; chmod 555 d/e d")
                forks = await backend.branch("one", template, "b")
                fork = await backend.create("two", forks)
                print((await run(fork, b"ls", b"-l", b"d/e"))[0].split()[2:3])
                await backend.snapshot("two", forks, "kept")
                for sandbox in ("one", "two"):
                    await backend.destroy(sandbox)
                await backend.prune("b")
        for name in ("t", "kept"):
            store.forget(name)
        print(store.collect(), len(list(store.layers.iterdir())), (home / "state").exists())
    asyncio.run(main())
    """
    closed = directory("closed", mode=0o555)
    (home / "t.tar").write_bytes(tar(*host_programs(), closed, entry("closed/file", b"x", mode=0)))
    *_, first, second, end = as_user(python, home, script)
    assert first == second == "[b'----------']"
    assert end == "5 0 False"


def test_an_ordinary_user_starts_anew_after_a_launcher_that_was_killed(python: str, home: Path) -> None:
    """Nobody is left with the killed one's capabilities to remove what its sandboxes closed."""
    script = """
    import os, signal

    async def main():
        async with opened() as backend:
            box = await backend.create("one", Template("t"))
            await run(box, b"sh", b"-c", b"mkdir -p d/e/f; echo x >d/g; chmod 0 d/e/f d/g; chmod 555 d/e d")
            os.kill(backend.launcher_pid, signal.SIGKILL)
            await box.wait_lost()
            await backend.destroy("one")
            print((await run(await backend.create("two", Template("t")), b"echo", b"again"))[0])
        print((Path(sys.argv[2]) / "state").exists())
    asyncio.run(main())
    """
    assert as_user(python, home, script) == ["b'again\\n'", "False"]


def test_where_user_namespaces_are_forbidden_it_says_what_to_do(tmp_path: Path) -> None:
    script = """
    async def main():
        backend = NamespaceBackend(Path(sys.argv[2]) / "state")
        try:
            await backend.open()
        except BackendUnavailable as error:
            print(error)
        await backend.close()
        print((Path(sys.argv[2]) / "state").exists())
    asyncio.run(main())
    """
    # The limit is one of the surrounding user namespace, so the host's own stays as it is.
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    package = str(Path(sandboxd.__file__).parent)
    command = [sys.executable, "-I", "-S", "-c", PRELUDE + textwrap.dedent(script), package, str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", *command],
        text=True,
        capture_output=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    message, left = done.stdout.splitlines()
    assert "unshare" in message
    assert "sysctl user.max_user_namespaces" in message
    assert left == "False"
