"""Images of the namespace backend: imported from every kind of archive, honest ones and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.backends.base import Connection
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import StartFailed
from sandboxd.images.importing import import_image
from sandboxd.images.store import ImageError, ImageNotFound, ImageStore
from sandboxd.types import Limits, Template
from tests.sandboxd.backend_kit import output, shell
from tests.sandboxd.image_kit import (
    assert_untouched,
    directory,
    docker_archive,
    entry,
    host_programs,
    imported,
    oci_archive,
    symlink,
    tar,
)

pytestmark = pytest.mark.anyio
Pack = Callable[[list[bytes], list[str]], bytes]


@pytest.fixture(scope="session")
def programs() -> bytes:
    """A layer with a shell, shared by all images here."""
    return tar(*host_programs(), directory("etc"), entry("etc/passwd", b"root:x:0:0::/:/bin/sh\n"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
async def backend(store: ImageStore, tmp_path: Path) -> AsyncIterator[NamespaceBackend]:
    store.open()
    backend = NamespaceBackend(tmp_path / "state", NamespaceOptions(images_dir=store.root))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()
    assert not (tmp_path / "state").exists()


@contextlib.asynccontextmanager
async def sandbox(backend: NamespaceBackend, image: str, name: str = "one") -> AsyncIterator[Connection]:
    connection = await backend.create(name, Template("t", image=image, limits=Limits()))
    try:
        yield connection
    finally:
        await connection.close()
        await backend.destroy(name)


async def test_a_root_file_system_is_all_that_its_sandbox_sees(
    backend: NamespaceBackend, store: ImageStore, programs: bytes
) -> None:
    image = await imported(store, programs)
    assert len(image.layers) == 1
    async with sandbox(backend, "t") as box:
        assert await output(box, "id -u") == "1000\n"
        assert await output(box, "ls /usr/share /usr/lib/python3 2>/dev/null; true") == ""
        assert "sandbox" in await output(box, "cat /etc/hostname /etc/hosts")
        assert await output(box, "cat /etc/passwd") == "root:x:0:0::/:/bin/sh\n"
        assert await output(box, "echo x > /tmp/x; cat /tmp/x; ls /dev/null /proc/self/status") != ""


async def test_sandboxes_of_one_image_do_not_see_each_other(
    backend: NamespaceBackend, store: ImageStore, programs: bytes
) -> None:
    await imported(
        store, tar(*host_programs(), directory("data", mode=0o777), entry("data/a", b"a", mode=0o666))
    )
    async with sandbox(backend, "t", "one") as one, sandbox(backend, "t", "two") as two:
        await output(one, "echo changed > /data/a; rm -f /data/none; touch /data/new")
        assert await output(two, "cat /data/a; ls /data") == "aa\n"
        assert await output(one, "cat /data/a; ls /data") == "changed\na\nnew\n"


@pytest.mark.parametrize("pack", [docker_archive, oci_archive])
async def test_layers_hide_link_and_own_as_they_say(
    backend: NamespaceBackend, store: ImageStore, programs: bytes, pack: Pack
) -> None:
    first = tar(
        directory("opt/app"),
        entry("opt/app/gone", b"1"),
        entry("opt/app/kept", b"kept"),
        directory("opt/replaced"),
        entry("opt/replaced/old", b"old"),
        entry("opt/file-to-directory", b"x"),
        entry("opt/owned", b"o", uid=1234, gid=4321, mode=0o4755),
        directory("opt/closed", mode=0o700),
        entry("opt/closed/secret", b"s"),
    )
    second = tar(
        entry("opt/app/.wh.gone"),
        directory("opt/replaced"),
        entry("opt/replaced/.wh..wh..opq"),
        entry("opt/replaced/new", b"new"),
        entry("opt/.wh.file-to-directory"),
        directory("opt/file-to-directory"),
        entry("opt/file-to-directory/in", b"in"),
        entry("opt/both", b"both"),
        entry("opt/hard", type=tarfile.LNKTYPE, linkname="opt/both"),
        symlink("opt/soft", "app/kept"),
    )
    env = ["PATH=/nowhere:/bin:/usr/bin", "GREETING=hi"]
    image = await imported(store, pack([programs, first, second], env))
    assert len(image.layers) == 3
    async with sandbox(backend, "t") as box:
        assert await output(box, "ls /opt/app /opt/replaced /opt/file-to-directory") == (
            "/opt/app:\nkept\n\n/opt/file-to-directory:\nin\n\n/opt/replaced:\nnew\n"
        )
        assert await output(box, "cat /opt/soft /opt/hard; stat -c %h /opt/both") == "keptboth2\n"
        # An ordinary user has one number alone to give, and nobody else's files.
        owner, read = ("1234 4321", False) if os.geteuid() == 0 else ("1000 1000", True)
        assert await output(box, "stat -c '%u %g %a' /opt/owned") == f"{owner} 4755\n"
        assert ((await shell(box, "cat /opt/closed/secret")).code == 0) is read
        assert await output(box, "echo $GREETING $PATH") == "hi /nowhere:/bin:/usr/bin\n"


async def test_the_working_directory_is_the_sandboxs_own(
    backend: NamespaceBackend, store: ImageStore
) -> None:
    """Whoever the image says it belongs to; what lies in it stays as it is."""
    own = [directory("workspace", uid=65534, gid=65534), entry("workspace/readme", b"kept")]
    await imported(store, tar(*host_programs(), *own))
    async with sandbox(backend, "t") as box:
        assert await output(box, "touch new; cat readme; ls") == "keptnew\nreadme\n"


async def test_a_templates_environment_wins_over_the_images(
    backend: NamespaceBackend, store: ImageStore, programs: bytes
) -> None:
    await imported(store, docker_archive([programs], ["A=image", "B=image"]))
    template = Template("t", image="t", env={b"B": b"template"})
    box = await backend.create("one", template)
    assert await output(box, "echo $A $B") == "image template\n"
    await backend.destroy("one")


async def test_imports_at_once_unpack_each_layer_once(store: ImageStore) -> None:
    shared, path = tar(entry("a", b"a" * 100_000)), store.root.with_name("shared.tar")
    path.write_bytes(docker_archive([shared, tar(entry("b"))]))
    said: list[str] = []
    names = [f"name-{number}" for number in range(6)]
    images = await asyncio.gather(*(import_image(store, str(path), name, said.append) for name in names))
    assert len({image.id for image in images}) == 1
    assert sum("MB" in line for line in said) == 2
    assert sum("there already" in line for line in said) == 10
    assert sorted(store.names()) == names
    assert len(list(store.layers.iterdir())) == 2


async def test_what_is_used_is_not_removed(
    backend: NamespaceBackend, store: ImageStore, programs: bytes
) -> None:
    await imported(store, programs)
    async with sandbox(backend, "t") as box:
        with pytest.raises(ImageError, match="in use"):
            store.forget("t")
        assert store.collect() == 0
        assert await output(box, "echo alive") == "alive\n"
    store.forget("t")
    assert store.collect() == 1
    assert_untouched(store)
    with pytest.raises(StartFailed, match="none is imported yet") as failed:
        await backend.create("two", Template("t", image="t"))
    assert not failed.value.retryable


async def test_a_second_name_keeps_the_image(store: ImageStore) -> None:
    archive = tar(entry("a"))
    first, second = await imported(store, archive, "first"), await imported(store, archive, "second")
    assert first.id == second.id
    store.forget("first")
    assert store.collect() == 0
    assert store.find("second").layers == first.layers
    assert store.find(first.id).id == first.id
    with pytest.raises(ImageNotFound, match="known here: second"):
        store.forget("first")


async def test_the_writable_layer_of_an_image_may_be_bounded(
    backend: NamespaceBackend, store: ImageStore, programs: bytes
) -> None:
    await imported(store, programs)
    limits = replace(Limits(), disk_bytes=4 << 20)
    box = await backend.create("one", Template("t", image="t", limits=limits))
    done = await shell(box, "cat /dev/zero > /workspace/full")
    assert b"No space left" in done.stderr
    await backend.destroy("one")


# -- the command


def command(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, "-m", "sandboxd", "image", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_the_command_imports_lists_and_removes(tmp_path: Path) -> None:
    where = ("--images-dir", tmp_path / "images")
    done = command("import", "-", "--name", "t", *where, input=tar(entry("a", b"a" * 2_000_000)))
    assert done.returncode == 0, done.stderr
    assert b"t: 1 layer, 2.0 MB, id " in done.stdout
    listed = json.loads(command("ls", "--json", *where).stdout)
    assert (listed["name"], listed["size_bytes"], listed["source"]) == ("t", 2_000_000, "-")
    assert b"2.0 MB" in command("ls", *where).stdout
    assert command("rm", "t", *where).stdout == b"t: removed\n"
    assert command("gc", *where).stdout == b"0 trees removed\n"
    assert list((tmp_path / "images" / "layers").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import", "/nowhere/x.tar", "--name", "t"), b"no such file"),
        (("import", "/dev/null", "--name", "t"), b"/dev/null: no file; give an archive"),
        (("rm", "t"), b"none is imported yet"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    arguments: tuple[str, ...], words: bytes, tmp_path: Path
) -> None:
    done = command(*arguments, "--images-dir", tmp_path / "images")
    assert done.returncode == 1
    assert done.stderr.startswith(b"sandboxd: ")
    assert done.stderr.count(b"\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_broken_off_import_is_swept(number: signal.Signals, tmp_path: Path) -> None:
    root = tmp_path / "images"
    words = [sys.executable, "-m", "sandboxd", "image", "import", "-", "--name", "t", "--images-dir"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*words, str(root)], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        # More than any pipe holds: once it is written, the import is under way.
        process.stdin.write(tar(entry("a", b"a" * 4_000_000))[:3_000_000])
        process.stdin.flush()
        process.send_signal(number)
        process.stdin.close()
        assert process.wait(20) != 0
    store = ImageStore(root)
    store.collect()
    assert_untouched(store)
    done = command("import", "-", "--name", "t", "--images-dir", root, input=tar(entry("a")))
    assert done.returncode == 0, done.stderr
