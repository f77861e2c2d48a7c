"""`sandboxd image`: the parts of the command line that work on the image store; they return the exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

from rich.table import Table

from sandboxd.config import default_images_dir
from sandboxd.images.store import Image, ImageError, ImageStore
from sandboxd.output import console, say


def _store(arguments: argparse.Namespace) -> ImageStore:
    return ImageStore(arguments.images_dir or default_images_dir())


async def add(arguments: argparse.Namespace) -> int:
    """`sandboxd image import`."""
    # Only here: the Docker SDK and what unpacks archives.
    from sandboxd.images.importing import import_image

    began = time.monotonic()
    tell = (lambda words: print(words, file=sys.stderr)) if arguments.json else print
    image = await import_image(_store(arguments), arguments.source, arguments.name, tell)
    seconds = time.monotonic() - began
    layers = f"{len(image.layers)} layer{'' if len(image.layers) == 1 else 's'}"
    words = f"{arguments.name}: {layers}, {image.size / 1e6:.1f} MB, id {image.id[:12]}, in {seconds:.1f} s"
    say(words, _as_json(arguments.name, image), as_json=arguments.json)
    return 0


async def show(arguments: argparse.Namespace) -> int:
    """`sandboxd image ls`."""
    store = _store(arguments)
    images = {name: store.find(name) for name in sorted(store.names())}
    if arguments.json:
        for name, image in images.items():
            print(json.dumps(_as_json(name, image)))
        return 0
    table = Table("NAME", "ID", "LAYERS", "SIZE", "AGE", "SOURCE", box=None)
    for name, image in images.items():
        hours = (time.time() - image.created) / 3600
        size = f"{image.size / 1e6:.1f} MB"
        table.add_row(name, image.id[:12], str(len(image.layers)), size, f"{hours:.1f} h", image.source)
    console().print(table)
    return 0


def _as_json(name: str, image: Image) -> dict[str, object]:
    return {
        "name": name,
        "id": image.id,
        "layers": [layer.digest for layer in image.layers],
        "size_bytes": image.size,
        "created": image.created,
        "source": image.source,
    }


async def drop(arguments: argparse.Namespace) -> int:
    """`sandboxd image rm`."""
    store = _store(arguments)
    store.open()
    store.forget(arguments.name)
    with contextlib.suppress(ImageError):  # an import is under way: the layers are for `image gc`
        store.collect()
    say(f"{arguments.name}: removed", {"name": arguments.name}, as_json=arguments.json)
    return 0


async def collect(arguments: argparse.Namespace) -> int:
    """`sandboxd image gc`."""
    store = _store(arguments)
    store.open()
    count = store.collect()
    words = f"{count} tree{'' if count == 1 else 's'} removed"
    say(words, {"trees_removed": count}, as_json=arguments.json)
    return 0
