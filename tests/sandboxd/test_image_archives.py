"""Archives made to break who imports images from them: each is refused by name, or harmless."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from sandboxd.images.store import ImageError, ImageNotFound, ImageStore
from tests.sandboxd.image_kit import (
    assert_untouched,
    directory,
    docker_archive,
    entry,
    imported,
    sha256,
    symlink,
    tar,
)

pytestmark = pytest.mark.anyio
LONG = "/".join(["d" * 200] * 25)
"""More than the 4096 bytes that one system call takes."""


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


async def test_paths_longer_than_a_system_call_takes(store: ImageStore) -> None:
    image = await imported(store, tar(entry(f"{LONG}/file", b"deep"), symlink("down", "d" * 200)))
    assert image.size == 4
    store.forget("t")
    assert store.collect() == 1
    assert_untouched(store)


HOSTILE = {
    "a name that leads outside": [entry("../../outside", b"x")],
    "a hard link to outside": [entry("a", type=tarfile.LNKTYPE, linkname="../../etc/passwd")],
    "a hard link to nothing": [entry("a", type=tarfile.LNKTYPE, linkname="missing")],
    "a file below a file": [entry("a", b"x"), entry("a/b", b"x")],
    "a link in a circle": [symlink("a", "a"), entry("a/b", b"x")],
    "a whiteout without a name": [entry(".wh.")],
    "an owner that no sandbox has": [entry("a", uid=65536)],
    "a time that is none": [entry("a", pax_headers={"mtime": "nan"})],
    "a name that is too long": [entry("n" * 300, b"x")],
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_archive_is_refused_by_name(store: ImageStore, what: str) -> None:
    last = HOSTILE[what][-1][0].name
    with pytest.raises(ImageError, match=last[:20].replace(".", r"\.")):
        await imported(store, tar(directory("fine"), *HOSTILE[what]))
    assert_untouched(store)


async def test_links_of_an_archive_lead_nowhere_on_the_host(store: ImageStore, tmp_path: Path) -> None:
    """A link to a directory of the host is one to the image's own."""
    victim = tmp_path / "victim"
    victim.mkdir()
    where = str(victim).lstrip("/")
    image = await imported(
        store,
        tar(
            directory(where),
            symlink("absolute", str(victim)),
            entry("absolute/planted", b"x"),
            symlink("upwards", "../../../../../../../.." + str(victim)),
            entry("upwards/too", b"x"),
            entry("/rooted", b"x"),
        ),
    )
    assert list(victim.iterdir()) == []
    tree = store.layers / image.layers[0].directory
    assert {path.name for path in (tree / where).iterdir()} == {"planted", "too"}
    assert (tree / "rooted").read_bytes() == b"x"


async def test_devices_and_attributes_are_left_out(store: ImageStore) -> None:
    """An archive cannot hide lower files, or make what it did not bring, by what overlay mounts believe."""
    attributes = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.overlay.redirect": "/etc"}
    image = await imported(
        store,
        tar(
            entry("sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
            entry("hidden", type=tarfile.CHRTYPE),
            directory("marked", pax_headers=attributes),
        ),
    )
    tree = store.layers / image.layers[0].directory
    assert [path.name for path in tree.iterdir()] == ["marked"]
    assert os.listxattr(tree / "marked") == []


def damaged() -> dict[str, tuple[bytes, str]]:
    layer = tar(entry("a", b"a" * 5000))
    good = docker_archive([layer])
    wrong = docker_archive([layer]).replace(sha256(layer).encode(), b"0" * 64)
    two = tar(entry("manifest.json", json.dumps([{}, {}]).encode()))
    missing = tar(entry("manifest.json", b'[{"Config": "none.json", "Layers": []}]'))
    many = docker_archive([tar(entry(str(number))) for number in range(101)])
    linked = tar(
        symlink("manifest.json", "other"), entry("other", b"[]"), symlink("index.json", "index.json")
    )
    zero = docker_archive([layer], ["A=\0"])
    zstd = docker_archive([layer]).replace(layer[:4], b"\x28\xb5\x2f\xfd", 1)
    return {
        "no archive": (b"hello " * 1000, "not a tar archive"),
        "an empty file": (b"", "not a tar archive"),
        "cut off": (good[: len(good) // 2], "damaged|not a tar archive|unexpected end"),
        "another layer than it says": (wrong, "is damaged"),
        "two images": (two, "2 images"),
        "a file that is missing": (missing, "none.json"),
        "a manifest that is no JSON": (tar(entry("manifest.json", b"{")), "not JSON"),
        "a manifest of something else": (tar(entry("manifest.json", b'{"a": 1}')), "docker save"),
        "an index of something else": (tar(entry("index.json", b"[]")), "OCI"),
        "too many layers": (many, "101 layers"),
        "zstd": (zstd, "zstd"),
        "a manifest that is a link": (linked, "manifest.json is no file"),
        "an environment that no command can have": (zero, "environment"),
    }


@pytest.mark.parametrize("what", damaged())
async def test_a_damaged_archive_is_named(store: ImageStore, what: str) -> None:
    archive, words = damaged()[what]
    with pytest.raises(ImageError, match=words):
        await imported(store, archive)
    assert_untouched(store)


async def test_a_layer_is_what_its_digest_says_to_the_last_byte(store: ImageStore) -> None:
    """Also behind the end of its archive, where who unpacks it has long stopped reading."""
    honest = tar(entry("bin/sh", b"honest"))
    hostile = tar(entry("bin/sh", b"hostile")) + b"\0" * 10_000_000
    archive = docker_archive([hostile]).replace(sha256(hostile).encode(), sha256(honest).encode())
    with pytest.raises(ImageError, match="is damaged"):
        await imported(store, archive)
    assert_untouched(store)


async def test_nobody_else_walks_into_the_store(store: ImageStore) -> None:
    await imported(store, tar(entry("a", mode=0o4755)))
    assert store.root.stat().st_mode & 0o777 == 0o700


async def test_a_name_that_is_used_again_lets_the_old_image_go(store: ImageStore) -> None:
    old, new = [await imported(store, tar(entry("a", data)), "t") for data in (b"old", b"new")]
    assert store.collect() == 1
    assert store.find("t").id == new.id
    with pytest.raises(ImageNotFound):
        store.find(old.id)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a" * 256, "../up"])
async def test_names_are_checked(store: ImageStore, name: str) -> None:
    with pytest.raises(ImageError, match="image name"):
        await imported(store, tar(entry("a")), name)
