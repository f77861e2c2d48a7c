"""A Docker Engine without room for what it is to store: said by name, and tried again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import docker.errors
import pytest

from sandboxd.backends.docker_images import Images
from sandboxd.backends.docker_start import Start
from sandboxd.backends.engine import Engine
from sandboxd.errors import Phase, StartFailed
from sandboxd.types import Template

pytestmark = pytest.mark.anyio
SAID = "failed to register layer: write /usr/lib/x.so: no space left on device"


class FullEngine(Engine):
    """Has no image, and no room for one."""

    def __init__(self) -> None:
        super().__init__("unix:///none")
        self.asked = 0

    async def call(self, function: Callable[[Any], Any]) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise docker.errors.ImageNotFound("404", explanation="No such image")
        return {}

    @contextlib.asynccontextmanager
    async def lines(
        self, method: str, target: str, headers: dict[str, str] | None = None, *, patient: bool = False
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async def progress() -> AsyncIterator[dict[str, Any]]:
            yield {"status": "Pulling"}
            yield {"error": SAID}

        yield progress()


async def test_an_image_for_which_there_is_no_room() -> None:
    with pytest.raises(StartFailed, match=r"DISK_FULL: image 'big' .*no space left on device") as raised:
        await Images(FullEngine(), "i").get(Template("t", image="big"))
    error = raised.value
    assert (error.phase, error.retryable, error.metadata["host"]) == (Phase.PULL, True, "DISK_FULL")


def test_a_container_for_which_there_is_no_room(tmp_path: Path) -> None:
    start = Start(FullEngine(), "c", tmp_path, None)
    error = start.refused(docker.errors.APIError("500", explanation=SAID))
    assert (error.retryable, error.metadata["host"]) == (True, "DISK_FULL")
    assert "host" not in start.refused(docker.errors.APIError("500", explanation="busy")).metadata
