"""A burst of each of several sizes on each of several targets: where does starting them break?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sandboxd.bench import burst, host
from sandboxd.bench.result import Result
from sandboxd.bench.session import BARE, Target
from sandboxd.errors import BackendUnavailable

COUNTS = (96, 192, 480, 960)


@dataclass(frozen=True, slots=True)
class Options:
    """Bursts of `counts` on each of the `targets`, each on a daemon of its own; else as `burst.Options`.

    A target whose backend is `docker-sdk` is the bare SDK.
    """

    counts: Sequence[int] = COUNTS
    targets: Sequence[Target] = field(default_factory=lambda: [Target()])
    hold_seconds: float = 0.0
    warm: bool = False
    clients: int = 1
    start_limit: int | None = None


async def run(options: Options, say: Callable[[Result], None] = lambda _: None) -> Result:
    """Measures one after the other, and tells `say` of each. One that cannot be measured has failed; the
    others are of use without it.
    """
    names = ", ".join(target.name for target in options.targets)
    result = Result("sweep", names, sum(options.counts) * len(options.targets))
    result.host = host.facts()
    for target in options.targets:
        for count in options.counts:
            try:
                step = await _step(target, count, options)
            except BackendUnavailable as error:
                step = Result("burst", target.name, count, failures=[f"not measured: {error}"], alive=0)
            result.steps.append(step)
            say(step)
    result.wall = sum(step.wall for step in result.steps)
    result.more = {"warm": options.warm, "hold_s": options.hold_seconds}
    return result


async def _step(target: Target, count: int, options: Options) -> Result:
    if target.backend == BARE:
        # Imported late: nothing else of a bench needs the package.
        from sandboxd.bench import docker_sdk

        return await docker_sdk.measure(
            target.image or "",
            lambda bare: docker_sdk.burst(bare, count, options.hold_seconds),
            target.runtime,
        )
    return await burst.run(
        burst.Options(
            count=count,
            target=target,
            start_limit=options.start_limit,
            hold_seconds=options.hold_seconds,
            warm=options.warm,
            clients=options.clients,
        )
    )


def parse_targets(text: str, image: str | None, base: Target) -> list[Target]:
    """`namespace,docker/runsc,docker-sdk`: each a backend and, of containers, a runtime. `image` is that of
    containers; the namespace backend then shows the host's own system. Raises ValueError.
    """
    backends = ("namespace", "docker", "fake", BARE)
    targets = []
    for word in text.split(","):
        backend, _, runtime = word.strip().partition("/")
        if backend not in backends:
            raise ValueError(f"{word.strip()!r} in the targets begins with none of {', '.join(backends)}")
        contained = backend in ("docker", BARE)
        if runtime and not contained:
            raise ValueError(f"{word.strip()!r} in the targets: only containers have a runtime")
        if contained and not image:
            raise ValueError(f"{word.strip()!r} in the targets needs --image NAME")
        targets.append(
            replace(base, backend=backend, runtime=runtime or None, image=image if contained else None)
        )
    return targets
