"""Exports an image from the Docker Engine of this host."""

from __future__ import annotations

from collections.abc import Iterator

import docker
import docker.errors
import requests

from sandboxd.images.store import ImageError

CALL_SECONDS = 600


def saved(name: str) -> Iterator[bytes]:
    """What `docker save NAME` writes. Blocks; raises ImageError."""
    try:
        client = docker.from_env(timeout=CALL_SECONDS)
        try:
            yield from client.images.get(name).save()
        finally:
            client.close()
    except docker.errors.ImageNotFound as error:
        raise ImageError(f"the Docker Engine has no image {name!r}; pull or build it first") from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise ImageError(f"the Docker Engine cannot export {name!r}: {error}") from error
