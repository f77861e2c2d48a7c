"""What every test may ask for: a Docker Engine with the test images, or a skip unless CI is set."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker.errors
import pytest

from sandboxd.backends.engine import Engine
from sandboxd.errors import BackendUnavailable

PYTHON_IMAGE = "sandboxd/test-python:latest"
BUSYBOX_IMAGE = "sandboxd/test-busybox:latest"


def _docker_is_missing() -> str | None:
    """One line that says why Docker tests cannot run here, or None."""

    async def look() -> str | None:
        engine = Engine()
        try:
            await engine.open()
            for image in (PYTHON_IMAGE, BUSYBOX_IMAGE):
                await engine.call(lambda api, name=image: api.inspect_image(name))
        except BackendUnavailable as error:
            return error.message
        except docker.errors.NotFound as error:
            return f"{error.explanation}: run `make images`"
        finally:
            engine.close()
        return None

    # In a thread: a test's own loop may be running by the time it asks.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, look()).result()


@pytest.fixture(scope="session", autouse=True)
def images_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An image store of the tests' own: daemons make theirs when they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOXD_IMAGES_DIR", str(tmp_path_factory.mktemp("images") / "store"))
        yield


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """Skips the test with one line where Docker or an image is missing; fails it when CI is set."""
    missing = _docker_is_missing()
    if missing is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, so the Docker tests may not be skipped: {missing}", pytrace=False)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def docker_python_image(docker_engine: None) -> str:
    """An image with Python 3: its sandboxes run the guest."""
    return PYTHON_IMAGE


@pytest.fixture(scope="session")
def docker_busybox_image(docker_engine: None) -> str:
    """An image without Python: its sandboxes run through the Engine's exec API."""
    return BUSYBOX_IMAGE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each reason to skip, however many tests share it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason}")
