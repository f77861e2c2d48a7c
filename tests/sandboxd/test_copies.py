"""What a copy of a sandbox's files holds, on the namespace backend, and what is left where none is made."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandboxd.backends.copier import OPEN_LEVELS, Copier
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import SandboxLost, StartFailed
from sandboxd.images.store import ImageError, ImageStore
from sandboxd.types import Command, Limits, Template
from tests.sandboxd.backend_kit import execute, output

from .copies_kit import stopped_copies
from .namespace_kit import inhabited, opened
from .test_forks import until

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def with_store(tmp_path: Path) -> AsyncIterator[tuple[NamespaceBackend, ImageStore]]:
    store = ImageStore(tmp_path / "images")
    store.open()
    async with opened(tmp_path / "state", NamespaceOptions(images_dir=store.root)) as backend:
        yield backend, store


async def test_all_that_a_file_system_can_hold_is_copied(backend: NamespaceBackend, tmp_path: Path) -> None:
    template = Template("t")
    source = await backend.create("source", template)
    await output(
        source,
        "mkfifo pipe; ln -s /nowhere link; echo x > a; ln a b; chmod 4711 a; mkdir -m 1777 sticky;"
        " touch -d @1000000000 old; python3 -c \"import os; os.truncate(os.open('hole', 66, 0o644), 1 << 30);"
        " os.setxattr('a', 'user.note', b'v')\"; mkdir removed; rmdir removed",
    )
    forks = await backend.branch("source", template, "b")
    fork = await backend.create("fork", forks)
    described = "stat -c '%n %F %a %h %s %u' *; stat -c %Y old; readlink link; du -k hole | cut -f1"
    assert await output(fork, described) == await output(source, described)
    assert await output(fork, "python3 -c \"import os; print(os.getxattr('a', 'user.note'))\"") == "b'v'\n"
    for name in ("source", "fork"):
        await backend.destroy(name)
    await backend.prune("b")


async def test_what_was_removed_from_a_lower_layer_stays_removed(backend: NamespaceBackend) -> None:
    template = Template("t")
    source = await backend.create("source", template)
    await output(source, "mkdir d; echo 1 > d/one; echo 2 > two")
    first = await backend.branch("source", template, "b1")
    fork = await backend.create("fork", first)
    await output(fork, "rm -r d two; mkdir d; echo 3 > d/three")
    second = await backend.branch("fork", first, "b2")
    last = await backend.create("last", second)
    assert await output(last, "ls . d") == ".:\nd\n\nd:\nthree\n"
    for name in ("source", "fork", "last"):
        await backend.destroy(name)
    for branch in ("b1", "b2"):
        await backend.prune(branch)


async def test_a_sandbox_that_changes_everything_meanwhile_is_copied_all_the_same(
    backend: NamespaceBackend, tmp_path: Path
) -> None:
    """Links put where directories were lead nowhere, not even to what the launcher can see."""
    template = Template("t")
    other, source = [await backend.create(name, template) for name in ("other", "source")]
    await output(other, "echo secret > key")
    secret = "/state/sandboxes/other/upper/workspace"
    loop = f"mkdir d 2>/dev/null; echo own > d/key; rm -r d; ln -sn {secret} d; rm d"
    script = f"mkdir -p x/y; while :; do {loop}; done"
    churn = asyncio.create_task(execute(source, Command(argv=(b"sh", b"-c", script.encode()), timeout=50.0)))
    await output(source, "until [ -d x/y ]; do :; done")
    for number in range(30):
        await backend.branch("source", template, f"b{number}")
        tree = tmp_path / "state" / "sandboxes" / f"branch.b{number}" / "workspace" / "d"
        key = tree / "key"
        assert tree.is_symlink() or not key.exists() or key.read_text() in ("own\n", "")
        await backend.prune(f"b{number}")
    for name in ("other", "source"):
        await backend.destroy(name)
    churn.cancel()
    await asyncio.wait([churn])


async def test_a_sandbox_that_ends_while_it_is_copied_gives_no_copy(
    backend: NamespaceBackend, tmp_path: Path
) -> None:
    template = Template("t", limits=Limits(memory_bytes=1 << 30))
    source = await backend.create("source", template)
    await output(source, "head -c 200000000 /dev/urandom > large; touch zzz")
    branching = asyncio.create_task(backend.branch("source", template, "b"))
    branch = tmp_path / "state" / "sandboxes" / "branch.b"
    await until(branch.exists)
    await backend.destroy("source")
    with pytest.raises(SandboxLost, match="ended while its files were copied"):
        await branching
    assert not branch.exists()


# So many directories within one another that their path is longer than the kernel takes at once.
NEST = """
import os
for number in range(600):
    os.mkdir("directory")
    os.chdir("directory")
    open("file", "w").write(str(number))
for _ in range(300):
    os.chdir("..")
os.utime(".", (1e9, 1e9))
"""
UNNEST = """
import os
for number in range(600):
    os.chdir("directory")
    if number == 299: print(int(os.stat(".").st_mtime))
print(open("file").read(), os.listdir("."))
"""


async def test_a_tree_of_any_depth_is_copied(tmp_path: Path) -> None:
    """Not what the sandbox has nested, however deep, makes a fork of it fail."""
    async with with_store(tmp_path) as (backend, store):
        template = Template("t")
        source = await backend.create("source", template)
        await output(source, f"python3 -c '{NEST}'")
        forks = await backend.branch("source", template, "b")
        fork = await backend.create("fork", forks)
        assert await output(fork, f"python3 -c '{UNNEST}'") == "1000000000\n599 ['file']\n"
        assert await backend.snapshot("source", template, "t") > 1000
        for name in ("source", "fork"):
            await backend.destroy(name)
        await backend.prune("b")
        assert inhabited(tmp_path / "state") == []
    store.forget("t")
    assert store.collect() == 1


class Moving(Copier):
    """Tells of each directory that it begins."""

    def __init__(self, begun: Callable[[int], None]) -> None:
        super().__init__(removable=True)
        self._begun, self._count = begun, 0

    def _begin(self, source: int, target: int, name: str) -> None:
        super()._begin(source, target, name)
        self._count += 1
        self._begun(self._count)


def nested(top: Path, count: int) -> None:
    """Directories `d` within one another, each beside two files."""
    for _ in range(count):
        top.mkdir()
        for name in ("a", "z"):
            (top / name).write_text("x")
        top = top / "d"


@pytest.mark.parametrize(("moved", "lost"), [((40,), ()), ((5,), ()), ((5, 4), (4,))])
def test_what_is_moved_while_a_copy_is_far_below_it_costs_no_other_file(
    tmp_path: Path, moved: tuple[int, ...], lost: tuple[int, ...]
) -> None:
    """One that is open all the while; one that the way back leads through; that and the one above it, whose
    other files are then nowhere to be found.
    """
    source, target, count = tmp_path / "source", tmp_path / "target", OPEN_LEVELS + 20
    nested(source, count + 1)
    target.mkdir()

    def begun(number: int) -> None:
        if number == count:
            for level in moved:
                source.joinpath(*["d"] * level).rename(tmp_path / f"elsewhere-{level}")

    opened = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (source, target)]
    before = sorted(Path("/proc/self/fd").iterdir())
    Moving(begun).copy(*opened)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    for fd in opened:
        os.close(fd)
    for level in range(count + 1):
        there = {path.name for path in target.joinpath(*["d"] * level).iterdir()} - {"d"}
        assert there == {"a", "z"} or level in lost, level


async def test_a_copy_without_an_image_store_says_so(backend: NamespaceBackend, tmp_path: Path) -> None:
    template = Template("t")
    await backend.create("source", template)
    with pytest.raises(StartFailed, match="image store"):
        await backend.snapshot("source", template, "t")
    assert inhabited(tmp_path / "state") == ["source"]
    await backend.destroy("source")


async def test_a_copy_that_is_given_up_leaves_nothing(backend: NamespaceBackend, tmp_path: Path) -> None:
    template = Template("t", limits=Limits(memory_bytes=1 << 30))
    source = await backend.create("source", template)
    await output(source, "head -c 100000000 /dev/urandom > large")
    branching = asyncio.create_task(backend.branch("source", template, "b"))
    branch = tmp_path / "state" / "sandboxes" / "branch.b"
    await until(branch.exists)
    branching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await branching
    assert not branch.exists()
    await backend.destroy("source")


async def test_a_broken_off_snapshot_is_swept(tmp_path: Path) -> None:
    async with with_store(tmp_path) as (backend, store):
        template = Template("t")
        source = await backend.create("source", template)
        await output(source, "head -c 50000000 /dev/urandom > large")
        snapshot = asyncio.create_task(backend.snapshot("source", template, "t"))
        await until(lambda: bool(list((store.root / "partial").iterdir())))
        snapshot.cancel()
        with pytest.raises(asyncio.CancelledError):
            await snapshot
        assert list((store.root / "partial").iterdir()) == []
        assert store.names() == {}
        assert await backend.snapshot("source", template, "t") == 50_000_000


async def test_a_snapshot_that_is_broken_off_after_a_layer_leaves_none(tmp_path: Path) -> None:
    async with with_store(tmp_path) as (backend, store):
        template = Template("t")
        source = await backend.create("source", template)
        await output(source, "echo first > first")
        forks = await backend.branch("source", template, "b")
        fork = await backend.create("fork", forks)
        await output(fork, "seq 5000 | xargs touch")
        snapshot = asyncio.create_task(backend.snapshot("fork", forks, "t"))
        await until(lambda: bool(stopped_copies("fork")))
        assert len(list(store.layers.iterdir())) == 1
        snapshot.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([snapshot])
        assert snapshot.cancelled()
        assert [*store.layers.iterdir(), *(store.root / "partial").iterdir()] == []


def locks() -> list[str]:
    """Those of this host; who waits for one has an arrow."""
    return Path("/proc/locks").read_text().splitlines()


def collects(store: ImageStore) -> bool:
    """Whether nobody holds its layers; none is to be removed."""
    with contextlib.suppress(ImageError):
        assert store.collect() == 0
        return True
    return False


async def test_a_snapshot_cancelled_while_it_waits_for_the_store_holds_no_lock(
    tmp_path: Path,
) -> None:
    """Else no layer could be removed before the daemon ends."""
    async with with_store(tmp_path) as (backend, store):
        await backend.create("source", Template("t"))
        with (store.root / "importing").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waits = f":{os.fstat(lock.fileno()).st_ino} "
            snapshot = asyncio.create_task(backend.snapshot("source", Template("t"), "t"))
            await until(lambda: any("->" in line and waits in line for line in locks()))
            snapshot.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([snapshot])
        assert snapshot.cancelled()
        # The thread that waited may have the lock for a moment.
        await until(lambda: collects(store))
