"""Archives to import images from, built entry by entry, and a small root file system of this host's own."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sandboxd.images.importing import import_image
from sandboxd.images.store import Image, ImageStore

PROGRAMS = ("sh", "cat", "chmod", "env", "id", "ls", "mkdir", "rm", "stat", "touch", "true")


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One entry of an archive; a regular file of root's unless `fields` say otherwise."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def directory(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, **{"type": tarfile.DIRTYPE, "mode": 0o755, **fields})


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """An archive without compression."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def host_programs() -> list[tuple[tarfile.TarInfo, bytes]]:
    """A shell and a few commands of this host with the libraries that they need."""
    paths = {shutil.which(name) for name in PROGRAMS} - {None}
    for program in list(paths):
        listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        paths |= {word for line in listed.splitlines() for word in line.split() if word.startswith("/")}
    return [
        entry(str(path).lstrip("/"), Path(str(path)).read_bytes(), mode=0o755)
        for path in sorted(map(str, paths))
    ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def docker_archive(layers: Iterable[bytes], env: Iterable[str] = ()) -> bytes:
    """What `docker save` of one image writes."""
    layers = list(layers)
    config = _config(layers, env)
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": ["t:latest"], "Layers": names}]).encode()
    files = [entry("manifest.json", manifest), entry("config.json", config)]
    return tar(*files, *(entry(name, layer) for name, layer in zip(names, layers, strict=True)))


def oci_archive(layers: Iterable[bytes], env: Iterable[str] = ()) -> bytes:
    """An OCI layout with gzipped layers, an index of platforms and a note of how it was built."""
    layers = list(layers)
    packed = [gzip.compress(layer, mtime=0) for layer in layers]
    blobs = {sha256(blob): blob for blob in packed}

    def stored(value: bytes) -> dict[str, str]:
        blobs[sha256(value)] = value
        return {"digest": f"sha256:{sha256(value)}"}

    config = stored(_config(layers, env))
    manifest = {"config": config, "layers": [{"digest": f"sha256:{sha256(blob)}"} for blob in packed]}
    note = {**stored(b"{}"), "annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    platforms = stored(json.dumps({"manifests": [stored(json.dumps(manifest).encode()), note]}).encode())
    index = json.dumps({"schemaVersion": 2, "manifests": [platforms]}).encode()
    files = [entry("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'), entry("index.json", index)]
    return tar(*files, *(entry(f"blobs/sha256/{digest}", blob) for digest, blob in blobs.items()))


def _config(layers: list[bytes], env: Iterable[str]) -> bytes:
    digests = [f"sha256:{sha256(layer)}" for layer in layers]
    return json.dumps(
        {"config": {"Env": list(env)}, "rootfs": {"type": "layers", "diff_ids": digests}}
    ).encode()


async def imported(store: ImageStore, archive: bytes, name: str = "t") -> Image:
    path = store.root.with_name("archive.tar")
    path.write_bytes(archive)
    return await import_image(store, str(path), name, print)


def assert_untouched(store: ImageStore) -> None:
    """A failed import leaves nothing but locks."""
    assert store.names() == {}
    assert list(store.layers.iterdir()) == []
    assert [path for path in (store.root / "partial").iterdir() if path.suffix != ".lock"] == []
