"""Helpers of the Docker tests: a backend that leaves nothing, one-line commands, images made on the spot."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxd.backends.base import Connection
from sandboxd.backends.docker import DockerBackend
from sandboxd.backends.docker_images import LABEL
from sandboxd.backends.engine import Engine
from sandboxd.backends.native import PROGRAM
from sandboxd.types import Command, Exited, ExitReason, Started, Stderr, Stdout, Template


@contextlib.asynccontextmanager
async def docker_backend(state_dir: Path, guest: Path = PROGRAM) -> AsyncIterator[DockerBackend]:
    """An open backend; afterwards no container, no image and no file of it may be left."""
    backend = DockerBackend(state_dir, guest=guest)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()
    assert await labelled(backend._instance) == ([], [])
    assert not state_dir.exists()


async def labelled(instance: str) -> tuple[list[str], list[str]]:
    """Containers and images that carry the instance's label."""
    async with engine() as open_engine:
        filters = {"label": f"{LABEL}={instance}"}
        containers = await open_engine.call(lambda api: api.containers(all=True, filters=filters))
        images = await open_engine.call(lambda api: api.images(filters=filters))
    return [c["Names"][0] for c in containers], [i["Id"] for i in images]


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    """The host's Engine, for looking behind the backend's back."""
    open_engine = Engine()
    await open_engine.open()
    try:
        yield open_engine
    finally:
        open_engine.close()


@contextlib.asynccontextmanager
async def sandbox(backend: DockerBackend, template: Template, name: str = "one") -> AsyncIterator[Connection]:
    """One sandbox for the length of the block."""
    connection = await backend.create(name, template)
    try:
        yield connection
    finally:
        await connection.close()
        await backend.destroy(name)


@dataclass(frozen=True)
class Result:
    """A command's whole story."""

    started: bool
    stdout: bytes
    stderr: bytes
    exited: Exited

    @property
    def code(self) -> int:
        assert self.exited.reason is ExitReason.EXITED, self
        return self.exited.exit_code


async def run(connection: Connection, *argv: str, **options: Any) -> Result:
    """Runs a command to its end and checks the order and the offsets of its events."""
    started, ended = False, None
    output = {Stdout: b"", Stderr: b""}
    async with connection.exec(Command(tuple(word.encode() for word in argv), **options)) as events:
        async for event in events:
            assert ended is None
            if isinstance(event, Stdout | Stderr):
                assert started
                assert event.offset == len(output[type(event)])
                output[type(event)] += event.data
            elif isinstance(event, Started):
                assert not started
                started = True
            else:
                ended = event
    assert ended is not None
    return Result(started, output[Stdout], output[Stderr], ended)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    """A source for `write_file`."""
    for piece in data:
        yield piece


def tar(files: dict[str, bytes]) -> bytes:
    """A tar of executable files, or symbolic links where the content begins with `->`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content.startswith(b"->"):
                entry.type, entry.linkname = tarfile.SYMTYPE, content[2:].decode()
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@contextlib.asynccontextmanager
async def image(name: str, files: dict[str, bytes]) -> AsyncIterator[str]:
    """An image that holds these files alone, gone after the block."""
    reference = f"sandboxd-test/{name}:latest"
    repository, _, tag = reference.partition(":")
    async with engine() as open_engine:
        await open_engine.call(
            lambda api: api.import_image_from_data(tar(files), repository=repository, tag=tag)
        )
        try:
            yield reference
        finally:
            await open_engine.call(lambda api: api.remove_image(reference, force=True))
