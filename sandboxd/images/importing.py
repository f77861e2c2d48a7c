"""Imports an image into the store: each layer that is missing is unpacked by a program of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from sandboxd.addresses import is_plain
from sandboxd.backends import bare
from sandboxd.backends.users import UID_BASE
from sandboxd.images.archives import PIECE_BYTES, LayerArchive, read_archive
from sandboxd.images.store import Image, ImageError, ImageStore, Layer, check_name

ENGINE_PREFIX = "docker:"
STANDARD_INPUT = "-"
END_SECONDS = 10.0

Say = Callable[[str], None]


async def import_image(store: ImageStore, source: str, name: str, say: Say) -> Image:
    """Imports `source` as `name`: a path, `-` for standard input, or `docker:IMAGE` of the local Engine.

    `say` hears of each step. Raises ImageError; what was unpacked whole by then is used by the next attempt.
    """
    check_name(name)
    store.open()
    with store.importing():
        async with _as_file(store, source, say) as path:
            archive = await asyncio.to_thread(read_archive, path)
            layers = [await _layer(store, layer, say) for layer in archive.layers]
        image = Image(tuple(layers), archive.env, source, time.time())
        store.add(name, image)
    return image


@contextlib.asynccontextmanager
async def _as_file(store: ImageStore, source: str, say: Say) -> AsyncIterator[Path]:
    """The source as a file that can be read more than once."""
    image = source.removeprefix(ENGINE_PREFIX)
    if not image:
        raise ImageError(
            f"source {source!r} names nothing; give an archive, - for standard input, or {ENGINE_PREFIX}IMAGE"
        )
    if image != source and not is_plain(image):
        raise ImageError(f"source {source!r}: an image's name is text in UTF-8, without a zero byte")
    if source == STANDARD_INPUT or image != source:
        with store.partial() as directory:
            path = directory / "archive.tar"
            if source == STANDARD_INPUT:
                await _written(_standard_input(), path)
            else:
                from sandboxd.images.engine import saved

                say(f"exporting {image} from the Docker Engine")
                await _written(saved(image), path)
            yield path
        return
    if not await asyncio.to_thread(Path(source).is_file):
        what = "no file" if await asyncio.to_thread(Path(source).exists) else "no such file"
        raise ImageError(f"{source}: {what}; give an archive, - for standard input, or {ENGINE_PREFIX}IMAGE")
    yield Path(source)


def _standard_input() -> Iterator[bytes]:
    if sys.stdin.isatty():
        raise ImageError("standard input is a terminal; pipe an archive into it")
    while piece := sys.stdin.buffer.read(PIECE_BYTES):
        yield piece


async def _written(data: Iterator[bytes], path: Path) -> None:
    """Writes what comes, in a thread; one that is no longer wanted ends with its next piece."""
    given_up = threading.Event()

    def write() -> None:
        try:
            with path.open("wb") as file:
                for piece in data:
                    if given_up.is_set():
                        return
                    file.write(piece)
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror}") from error

    try:
        await asyncio.to_thread(write)
    finally:
        given_up.set()


async def _layer(store: ImageStore, archive: LayerArchive, say: Say) -> Layer:
    async with store.only_one(archive.digest):
        if store.has(archive.digest):
            say(f"layer {archive.digest[:12]}: there already")
            return Layer(archive.digest, store.size_of(archive.digest))
        with store.partial() as directory:
            tree = directory / "tree"
            tree.mkdir(mode=0o755)
            size, left_out = await unpack(archive, tree)
            store.add_layer(archive.digest, tree)
    noted = f", {left_out} devices left out" if left_out else ""
    say(f"layer {archive.digest[:12]}: {size / 1e6:.1f} MB{noted}")
    return Layer(archive.digest, size)


async def unpack(archive: LayerArchive, tree: Path) -> tuple[int, int]:
    """Fills the empty directory; returns the bytes of its files and how many entries were left out.

    Raises ImageError.
    """
    command = bare.command(sys.executable, "sandboxd.images.unpack", str(tree), str(UID_BASE))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env={}, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        reads = True
        for piece in archive.pieces():  # to their end, whoever reads them: only there the digest is known
            if reads:
                try:
                    process.stdin.write(piece)
                    await process.stdin.drain()
                except ConnectionError:
                    reads = False  # it has all that it wants, or says why not
        process.stdin.close()
        answer = json.loads(await process.stdout.read() or b"{}")
        await process.wait()
    finally:
        if process.returncode is None:
            # Both processes of it: the output ends when both are gone, and nobody writes any more.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.stdout.read())
            await process.wait()
    if "size" not in answer:
        why = answer.get("error") or "the program that unpacks it died"
        raise ImageError(f"layer {archive.digest[:12]}: {why}")
    return answer["size"], answer["left_out"]
