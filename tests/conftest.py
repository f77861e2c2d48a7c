"""What every test may ask for: a Docker Engine with the test images, or a skip unless CI is set."""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker.errors
import pytest

from sandboxd.backends.engine import Engine
from sandboxd.errors import BackendUnavailable

PYTHON_IMAGE = "sandboxd/test-python:latest"
BUSYBOX_IMAGE = "sandboxd/test-busybox:latest"
ROOT = Path(__file__).parents[1]
# The Docker Engine, alone or among other backends, and the one build of the guest with sanitizers.
SHARED = re.compile(r"docker_engine|docker_(python|busybox)_image|\bCase\b|sanitized")
# These use up processes of the sandboxes' user, or count them.
SHARING = ("test_cli.py", "test_doctor.py", "test_endings.py")


def _docker_is_missing() -> str | None:
    """One line that says why Docker tests cannot run here, or None."""

    async def look() -> str | None:
        engine = Engine()
        try:
            await engine.open()
            await engine.call(lambda api: [api.inspect_image(name) for name in (PYTHON_IMAGE, BUSYBOX_IMAGE)])
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `pytest -n 2`: each part of the suite is one worker's; who is done takes the next."""
    from xdist.scheduler import LoadScopeScheduling

    class Parts(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return part_of(ROOT / nodeid.partition("::")[0])

    return Parts(config, log)


@functools.cache
def part_of(file: Path) -> str:
    """Which part of the suite a file belongs to: what starts engines and trainers, what shares something of
    the host, or the file alone. Parts may run side by side.
    """
    if file.parent.name == "rl":
        return "rl"
    return "host" if file.name in SHARING or SHARED.search(file.read_text()) else file.name


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each reason to skip, however many tests share it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason}")
