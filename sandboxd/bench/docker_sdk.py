"""The same work on the bare Docker SDK, as one would write it without this project: the baseline.

Containers sleep and have no network; commands go by `docker exec`. The SDK blocks, so callers are
threads; `parallel` of them, since an engine that is asked for all at once gets slower, not faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
from docker.errors import DockerException

from sandboxd.bench import load, phases
from sandboxd.bench.plan import Visit
from sandboxd.bench.result import Result
from sandboxd.bench.session import BARE, COMMAND
from sandboxd.errors import BackendUnavailable

PARALLEL = 4
"""Where the engine's own throughput peaks on two cores; see docs/log.md."""
TIMEOUT_SECONDS = 600
LABEL = "sandboxd.bench"
SLEEP = ["sleep", "100000"]


class Bare:
    """An engine, an image, and the containers made of it on a runtime (the engine's own when None), all
    removed by `close`.
    """

    def __init__(self, image: str, runtime: str | None = None, parallel: int = PARALLEL) -> None:
        self._image, self._runtime = image, runtime
        self._mark = uuid.uuid4().hex[:12]
        self._threads = ThreadPoolExecutor(parallel)
        try:
            self._client: Any = docker.from_env(timeout=TIMEOUT_SECONDS, max_pool_size=2 * parallel)
            self._client.images.get(image)
        except DockerException as error:
            raise BackendUnavailable(f"the baseline needs Docker with image {image!r}: {error}") from error

    @property
    def name(self) -> str:
        """What results call it."""
        return f"{BARE}/{self._runtime}" if self._runtime else BARE

    def create(self) -> Any:
        """A container that does not run yet."""
        labels, runtime = {LABEL: self._mark}, self._runtime
        return self._client.containers.create(
            self._image, SLEEP, network_mode="none", labels=labels, runtime=runtime
        )

    def start(self) -> Any:
        """A running container."""
        container = self.create()
        container.start()
        return container

    def each(self, act: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Does `act` on every item, `parallel` at a time."""
        list(self._threads.map(act, items))

    def remove_all(self) -> int:
        """How many are still there afterwards."""
        self.each(lambda container: container.remove(force=True), self._all())
        return len(self._all())

    def _all(self) -> list[Any]:
        filters = {"label": f"{LABEL}={self._mark}"}
        found: list[Any] = self._client.containers.list(all=True, filters=filters, ignore_removed=True)
        return found

    def close(self) -> None:
        """Removes every container of this measurement."""
        self.remove_all()
        self._threads.shutdown()
        self._client.close()


def run_command(container: Any) -> None:
    """Raises RuntimeError when it fails."""
    code = container.exec_run(COMMAND).exit_code
    if code:
        raise RuntimeError(f"a command ended with {code}")


def burst(bare: Bare, count: int, hold: float = 0.0) -> Result:
    """`count` containers, each counted once its first command succeeded; all are held for `hold` seconds,
    looked at again and removed.
    """
    result = Result("burst", bare.name, count, alive=0)
    begin = time.perf_counter()
    visits: list[Visit] = []
    held: list[Any] = []

    def one(_: int) -> None:
        with _noting(result):
            visit = Visit(0.0, time.perf_counter() - begin)
            container = bare.create()
            created = time.perf_counter() - begin
            container.start()
            visit.acquired = time.perf_counter() - begin
            visit.parts = {"create": created - visit.sent, "start": visit.acquired - created}
            held.append(container)
            run_command(container)
            visit.done = time.perf_counter() - begin
            visits.append(visit)

    def look(container: Any) -> None:
        with _noting(result):
            run_command(container)
            result.add("look", 0.0)

    bare.each(one, range(count))
    result.wall = time.perf_counter() - begin
    result.samples = {
        "ready": [visit.done for visit in visits if visit.done],
        "exec": [visit.done - visit.acquired for visit in visits if visit.done and visit.acquired],
    }
    time.sleep(hold)
    bare.each(look, held)
    result.alive = len(result.samples.pop("look", []))
    result.more = {"phases": phases.summary(visits), "hold_s": hold, "retries": 0}
    result.more["success_rate"] = len(visits) / count
    result.more["ready_over_time"] = load.ready_over_time(visits)
    result.leaked = {"containers": bare.remove_all()}
    return result


@contextlib.contextmanager
def _noting(result: Result) -> Iterator[None]:
    try:
        yield
    except (DockerException, RuntimeError) as error:
        result.failures.append(str(error))


def commands(bare: Bare, count: int) -> Result:
    """`count` commands in one container, one after the other."""
    result = Result("exec", bare.name, count)
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
    result = Result("churn", bare.name, 0)
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


async def measure(image: str, work: Callable[[Bare], Result], runtime: str | None = None) -> Result:
    """Does `work` in a thread and removes what it made. Raises BackendUnavailable without an engine."""

    def all_of_it() -> Result:
        bare = Bare(image, runtime)
        try:
            return work(bare)
        except DockerException as error:
            raise BackendUnavailable(f"the baseline failed: {error}") from error
        finally:
            bare.close()

    return await asyncio.to_thread(all_of_it)
