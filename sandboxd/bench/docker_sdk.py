"""The same work on the bare Docker SDK, as one would write it without this project: the baseline.

Containers sleep and have no network; commands go by `docker exec`. The SDK blocks, so callers are
threads; `parallel` of them, since an engine that is asked for all at once gets slower, not faster.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
from docker.errors import DockerException

from sandboxd.bench.result import Result
from sandboxd.bench.session import COMMAND
from sandboxd.errors import BackendUnavailable

BACKEND = "docker-sdk"
PARALLEL = 4
"""Where the engine's own throughput peaks on two cores; see docs/log.md."""
TIMEOUT_SECONDS = 600
LABEL = "sandboxd.bench"
SLEEP = ["sleep", "100000"]


class Bare:
    """An engine, an image, and the containers made of it, all removed by `close`."""

    def __init__(self, image: str, parallel: int = PARALLEL) -> None:
        self._image = image
        self._mark = uuid.uuid4().hex[:12]
        self._threads = ThreadPoolExecutor(parallel)
        try:
            self._client: Any = docker.from_env(timeout=TIMEOUT_SECONDS, max_pool_size=2 * parallel)
            self._client.images.get(image)
        except DockerException as error:
            raise BackendUnavailable(f"the baseline needs Docker with image {image!r}: {error}") from error

    def start(self) -> Any:
        """A running container."""
        labels = {LABEL: self._mark}
        return self._client.containers.run(
            self._image, SLEEP, detach=True, network_mode="none", labels=labels
        )

    def each(self, act: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Does `act` on every item, `parallel` at a time."""
        list(self._threads.map(act, items))

    def close(self) -> None:
        """Removes every container of this measurement."""
        left = self._client.containers.list(all=True, filters={"label": f"{LABEL}={self._mark}"})
        self.each(lambda container: container.remove(force=True), left)
        self._threads.shutdown()
        self._client.close()


def run_command(container: Any) -> None:
    """Raises RuntimeError when it fails."""
    code = container.exec_run(COMMAND).exit_code
    if code:
        raise RuntimeError(f"a command ended with {code}")


def burst(bare: Bare, count: int) -> Result:
    """`count` containers, each counted once its first command succeeded."""
    result = Result("burst", BACKEND, count)
    begin = time.perf_counter()

    def one(_: int) -> None:
        try:
            container = bare.start()
            started = time.perf_counter()
            run_command(container)
        except (DockerException, RuntimeError) as error:
            result.failures.append(str(error))
            return
        done = time.perf_counter()
        result.add("ready", done - begin)
        result.add("exec", done - started)

    bare.each(one, range(count))
    result.wall = time.perf_counter() - begin
    return result


def commands(bare: Bare, count: int) -> Result:
    """`count` commands in one container, one after the other."""
    result = Result("exec", BACKEND, count)
    container = bare.start()
    begin = time.perf_counter()
    for _ in range(count):
        began = time.perf_counter()
        run_command(container)
        result.add("exec", time.perf_counter() - began)
    result.wall = time.perf_counter() - begin
    return result


def churn(bare: Bare, seconds: float, parallel: int = PARALLEL) -> Result:
    """Start, run one command, remove, over and over."""
    result = Result("churn", BACKEND, 0)
    begin = time.perf_counter()

    def caller(_: int) -> None:
        while time.perf_counter() < begin + seconds:
            began = time.perf_counter()
            container = bare.start()
            run_command(container)
            result.add("ready", time.perf_counter() - began)
            container.remove(force=True)

    bare.each(caller, range(parallel))
    result.wall = time.perf_counter() - begin
    result.count = result.successes
    return result


async def measure(image: str, work: Callable[[Bare], Result]) -> Result:
    """Does `work` in a thread and removes what it made. Raises BackendUnavailable without an engine."""

    def all_of_it() -> Result:
        bare = Bare(image)
        try:
            return work(bare)
        except DockerException as error:
            raise BackendUnavailable(f"the baseline failed: {error}") from error
        finally:
            bare.close()

    return await asyncio.to_thread(all_of_it)
