"""What every backend owes the pool of its sandboxes' files, checked on each, and what a tree travels as."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import AsyncIterator

import pytest

from sandboxd.backends.base import Connection
from sandboxd.errors import FileFailed, FileNotFound
from sandboxd.types import FileInfo, FileKind

from .archive_kit import in_parts, member, packed
from .backend_kit import Case, pieces, read, shell

pytestmark = pytest.mark.anyio
LONG = "d" * 90 + "/" + "e" * 90 + "/" + "ü" * 60


async def test_files_come_back_as_they_were_written(box: Connection) -> None:
    data = os.urandom(3_000_001)
    assert await box.files.write(b"a/b/c", pieces(data[:5], b"", data[5:]), 0o640) == len(data)
    assert await read(box, b"a/b/c") == data
    assert await read(box, b"a/b/c", offset=2_999_990) == data[-11:]
    assert await read(box, b"a/b/c", offset=10, limit=20) == data[10:30]
    assert await read(box, b"a/b/c", limit=0) == b""
    assert (await shell(box, "stat -c %a a/b/c")).stdout == b"640\n"
    assert await box.files.write(b"a/b/c", pieces(b"short"), 0o755) == 5
    assert await read(box, b"a/b/c") == b"short"
    assert await box.files.write(b"empty", pieces(), 0o644) == 0
    assert await read(box, b"empty") == b""


async def test_files_that_cannot_be(box: Connection) -> None:
    with pytest.raises(FileNotFound, match="missing"):
        await read(box, b"missing")
    assert (await shell(box, "mkdir directory; echo x > plain")).code == 0
    with pytest.raises(FileFailed):
        await read(box, b"directory")
    with pytest.raises(FileFailed):
        await box.files.write(b"directory", pieces(b"x"), 0o644)
    with pytest.raises(FileFailed):
        await box.files.write(b"plain/below", pieces(b"x"), 0o644)
    assert (await shell(box, "ls -A")).stdout == b"directory\nplain\n"


async def test_a_write_that_fails_leaves_the_old_file(box: Connection) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("the caller failed")

    await box.files.write(b"file", pieces(b"old"), 0o644)
    with pytest.raises(RuntimeError, match="the caller failed"):
        await box.files.write(b"file", broken(), 0o644)
    assert await read(box, b"file") == b"old"


async def names(box: Connection, path: bytes) -> list[bytes]:
    return [info.name async for info in box.files.list_directory(path)]


async def test_what_is_at_a_path(box: Connection) -> None:
    script = (
        "mkdir d; printf 12345 >d/f; chmod 640 d/f; ln -s nowhere d/l; mkfifo d/p; touch -d @1000000000 d/f"
    )
    assert (await shell(box, script)).code == 0
    found = await box.files.stat(b"d/f")
    assert found == FileInfo(b"f", FileKind.FILE, 5, 0o640, 1e9)
    link = await box.files.stat(b"/workspace/d/l")
    assert (link.name, link.kind, link.target) == (b"l", FileKind.SYMLINK, b"nowhere")
    assert (await box.files.stat(b"d/p")).kind is FileKind.OTHER
    directory = await box.files.stat(b"d/")
    assert (directory.name, directory.kind) == (b"d", FileKind.DIRECTORY)
    with pytest.raises(FileNotFound, match="none"):
        await box.files.stat(b"none")
    listed = {info.name: info async for info in box.files.list_directory(b"d")}
    assert (listed[b"f"], listed[b"l"]) == (found, link)


async def test_what_a_directory_holds(case: Case, box: Connection) -> None:
    wanted = [b".hidden", b"..dots", b"a b", b"new\nline", b"z"] + ([] if case.by_engine else [b"\xff"])
    for name in wanted:
        await box.files.write(b"d/" + name, pieces(name), 0o644)
    assert await names(box, b"d") == sorted(wanted)
    assert (
        await shell(box, "mkdir empty many; cd many; i=0; while [ $i -lt 3000 ]; do : >$i; i=$((i+1)); done")
    ).code == 0
    assert await names(box, b"empty") == []
    assert await names(box, b"many") == sorted(b"%d" % number for number in range(3000))
    with pytest.raises(FileNotFound):
        await names(box, b"none")
    with pytest.raises(FileFailed, match="irectory"):
        await names(box, b"d/z")


async def test_removing(box: Connection) -> None:
    assert (
        await shell(box, "mkdir -p d/e/f; for i in 1 2 3; do : >d/$i; done; ln -s d link; : >file")
    ).code == 0
    await box.files.remove(b"file", recursive=False)
    await box.files.remove(b"link", recursive=True)
    assert await names(box, b"d") == [b"1", b"2", b"3", b"e"], "the link is gone, not what it led to"
    with pytest.raises(FileFailed, match=r"not empty|ENOTEMPTY"):
        await box.files.remove(b"d", recursive=False)
    await box.files.remove(b"d/e/f", recursive=False)
    await box.files.remove(b"d", recursive=True)
    with pytest.raises(FileNotFound):
        await box.files.remove(b"d", recursive=True)
    assert await names(box, b".") == []


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
async def test_a_tree_is_unpacked(case: Case, box: Connection, form: int) -> None:
    # The image's own tar closes a directory before it fills it.
    closed = 0o755 if case.by_engine else 0o555
    long = "long/" + "x" * 80 + "/" + "y" * 80
    data = packed(
        member("./", tarfile.DIRTYPE, mode=0o755),
        member("closed", tarfile.DIRTYPE, mode=closed, mtime=1_000_000_000),
        member("closed/program", mode=0o755, mtime=1_000_000_001),
        member(long),
        member("link", tarfile.SYMTYPE, linkname="closed/program"),
        member("same", tarfile.LNKTYPE, linkname="closed/program"),
        form=form,
    )
    assert await box.files.unpack(b"tree", in_parts(data, 1000)) == 6
    assert await read(box, b"tree/" + long.encode()) == long.encode()
    seen = await shell(
        box, "cd tree; stat -c %a closed; stat -c '%a %Y' closed/program; cat link same; stat -c %h same"
    )
    assert seen.stdout == b"%o\n755 1000000001\nclosed/programclosed/program2\n" % closed
    if not case.by_engine:
        assert (await box.files.stat(b"tree/closed")).modified == 1_000_000_000


async def test_a_tree_comes_back_as_it_was(box: Connection) -> None:
    script = f"""
    mkdir -p tree/empty tree/{LONG}; cd tree
    head -c 3000000 /dev/urandom >large; : >none; printf x >{LONG}/deep; chmod 750 large
    ln large other; ln -s /nowhere/at/all absolute; mkfifo pipe; touch -d @1234567890 none
    """
    done = await shell(box, script)
    assert done.code == 0, done.stderr
    data = b"".join([piece async for piece in box.files.pack(b"tree")])
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        found = {member.name.removeprefix("./"): member for member in reader.getmembers()}
    assert set(found) >= {"large", "other", "none", f"{LONG}/deep", "empty", "absolute", "pipe"}
    assert found["absolute"].linkname == "/nowhere/at/all"
    assert {found["large"].islnk(), found["other"].islnk()} == {True, False}
    assert (found["none"].mtime, found["pipe"].isfifo(), found["empty"].isdir()) == (1234567890, True, True)
    assert await box.files.unpack(b"again", in_parts(data, 100_000)) == len(found)
    for name in ("large", f"{LONG}/deep", "none"):
        path = b"/" + name.encode()
        assert await read(box, b"again" + path) == await read(box, b"tree" + path)
    again = await shell(box, "cd again; stat -c '%a %h' other; readlink absolute")
    assert again.stdout == b"750 2\n/nowhere/at/all\n"


async def test_unpacking_replaces_what_is_in_the_way(box: Connection) -> None:
    assert (
        await shell(box, "mkdir -p t/d; echo old >t/f; ln -s /etc/passwd t/l; echo kept >t/d/k")
    ).code == 0
    data = packed(member("f"), member("l"), member("d", tarfile.DIRTYPE, mode=0o755), member("d/new"))
    assert await box.files.unpack(b"t", pieces(data)) == 4
    assert (await shell(box, "cd t; cat f l d/k d/new; test ! -L l")).stdout == b"flkept\nd/new"


async def test_what_is_there_already_stays_usable(case: Case, box: Connection) -> None:
    """A tree that is unpacked twice, a directory that is the sandbox's own, a file that links to itself."""
    tree = packed(
        member("./", tarfile.DIRTYPE, mode=0o700),
        member("closed", tarfile.DIRTYPE, mode=0o555),
        member("closed/f", mode=0o600),
        member("closed", tarfile.DIRTYPE, mode=0o500),
        member("file", tarfile.DIRTYPE, mode=0o755),
        member("self"),
        member("self", tarfile.LNKTYPE, linkname="self"),
    )
    assert (await shell(box, "mkdir t; chmod 755 t; echo in the way >t/file")).code == 0
    if case.by_engine:  # what the image's own tar does with such trees is its own
        with contextlib.suppress(FileFailed):
            await box.files.unpack(b"t", pieces(tree))
        return
    for _ in range(2):
        assert await box.files.unpack(b"t", pieces(tree)) == 7
    seen = await shell(box, "stat -c %a t t/closed t/closed/f t/file; cat t/self")
    assert seen.stdout == b"755\n500\n600\n755\nself"


async def test_dates_that_only_the_file_system_knows(box: Connection) -> None:
    assert (await shell(box, "touch -d '2400-01-01 00:00' far || touch -t 203801010000 far")).code == 0
    assert (await box.files.stat(b"far")).modified > 2e9
    assert await names(box, b".") == [b"far"]


async def test_a_directory_that_goes_while_a_file_is_written(box: Connection) -> None:
    async def data() -> AsyncIterator[bytes]:
        yield bytes(100_000)
        assert (await shell(box, "rm -rf d")).code == 0
        yield bytes(100_000)

    with pytest.raises((FileNotFound, FileFailed)):
        await box.files.write(b"d/f", data(), 0o644)
    await box.ping()
    assert await names(box, b".") == []


async def test_a_slash_at_the_end_follows_no_link(box: Connection) -> None:
    assert (await shell(box, "mkdir d; : >d/kept; ln -s d link")).code == 0
    assert (await box.files.stat(b"link/")).kind is FileKind.SYMLINK
    await box.files.remove(b"link/", recursive=True)
    assert await names(box, b".") == [b"d"]
    assert await names(box, b"d/") == [b"kept"]


async def test_names_that_look_like_options(box: Connection) -> None:
    await box.files.write(b"-rf", pieces(b"data"), 0o644)
    assert await read(box, b"-rf") == b"data"
    assert (await box.files.stat(b"-rf")).size == 4
    assert await box.files.unpack(b"-d", pieces(packed(member("f")))) == 1
    assert await names(box, b"-d") == [b"f"]
    await box.files.remove(b"-rf", recursive=False)
    await box.files.remove(b"-d", recursive=True)
    assert await names(box, b".") == []
