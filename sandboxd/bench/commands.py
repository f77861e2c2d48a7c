"""`sandboxd bench`, one function for each shape: from the arguments to what is measured, shown and written.

Each returns the exit code: 1 when something failed or was left behind, or where `--slo` is given, when a
term of it was missed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sandboxd.backends.faults import Fault
from sandboxd.bench import (
    arrivals,
    bombs,
    burst,
    chaos,
    churn,
    command,
    comparing,
    fork,
    page,
    report,
    slo,
    soak,
    starts,
    sweep,
)
from sandboxd.bench.result import Result
from sandboxd.bench.session import Target
from sandboxd.client import Client
from sandboxd.config import ConfigError
from sandboxd.output import write_json

if TYPE_CHECKING:
    from sandboxd.bench.docker_sdk import Bare

    Baseline = Callable[[Bare], Result]

CLIENTS_MOST = 64
START_LIMIT_MOST = 1024


async def _burst(arguments: argparse.Namespace) -> int:
    _check(arguments, "count", hold=0.0)
    if arguments.no_exec and arguments.baseline:
        raise ConfigError("--no-exec: the baseline runs a command in each container; leave out one of them")
    options = burst.Options(
        count=arguments.count,
        target=await _target(arguments),
        start_limit=arguments.start_limit,
        hold_seconds=arguments.hold,
        warm=arguments.warm,
        clients=arguments.clients,
        execute=not arguments.no_exec,
    )
    from sandboxd.bench import docker_sdk

    return await _measured(
        arguments,
        burst.run(options),
        lambda bare: docker_sdk.burst(bare, options.count, options.hold_seconds),
    )


async def _sweep(arguments: argparse.Namespace) -> int:
    _check(arguments, hold=0.0)
    base = await _running_or_own(arguments)
    if arguments.address:
        targets = [base]
    else:
        try:
            targets = sweep.parse_targets(arguments.targets, arguments.image, base)
        except ValueError as error:
            raise ConfigError(f"bench sweep: {error}") from None
    options = sweep.Options(
        counts=arguments.counts,
        targets=targets,
        hold_seconds=arguments.hold,
        warm=arguments.warm,
        clients=arguments.clients,
        start_limit=arguments.start_limit,
    )
    return await _measured(arguments, sweep.run(options, report.show_step))


async def _open_loop(arguments: argparse.Namespace) -> int:
    _check(arguments, warm=0, hold=0.0)
    first = getattr(arguments, "first", 0.0)
    for rate, allowed in ((first, first >= 0), (arguments.last, arguments.last > 0)):
        if not (allowed and rate < float("inf")):
            raise ConfigError(
                f"bench {arguments.shape}: {rate:g} callers a second; a rate must be above 0, --from may be 0"
            )
    _check_seconds(arguments)
    options = arrivals.Options(
        shape=arguments.shape,
        first=first,
        last=arguments.last,
        target=await _target(arguments),
        seconds=arguments.seconds,
        hold_seconds=arguments.hold,
        warm=arguments.warm,
        clients=arguments.clients,
        seed=getattr(arguments, "seed", 0),
    )
    return await _measured(arguments, arrivals.run(options))


async def _churn(arguments: argparse.Namespace) -> int:
    _check(arguments, "callers", "warm")
    _check_seconds(arguments)
    options = churn.Options(
        target=await _target(arguments),
        callers=arguments.callers,
        warm=arguments.warm,
        seconds=arguments.seconds,
        start_limit=arguments.start_limit,
        clients=arguments.clients,
    )
    from sandboxd.bench import docker_sdk

    return await _measured(
        arguments, churn.run(options), lambda bare: docker_sdk.churn(bare, options.seconds)
    )


async def _soak(arguments: argparse.Namespace) -> int:
    _check(arguments, "cycles", "callers")
    options = soak.Options(
        target=await _target(arguments), cycles=arguments.cycles, callers=arguments.callers
    )
    return await _measured(arguments, soak.run(options))


async def _exec(arguments: argparse.Namespace) -> int:
    _check(arguments, "count", "concurrency", "streams", "output_mb")
    options = command.Options(
        count=arguments.count,
        target=await _target(arguments),
        concurrency=arguments.concurrency,
        streams=arguments.streams,
        output_bytes=arguments.output_mb * command.MEGABYTE,
    )
    from sandboxd.bench import docker_sdk

    return await _measured(
        arguments, command.run(options), lambda bare: docker_sdk.commands(bare, options.count)
    )


async def _fork(arguments: argparse.Namespace) -> int:
    _check(arguments, "count", "megabytes", "rounds")
    options = fork.Options(
        target=await _target(arguments),
        count=arguments.count,
        megabytes=arguments.megabytes,
        rounds=arguments.rounds,
    )
    return await _measured(arguments, fork.run(options))


async def _telemetry(arguments: argparse.Namespace) -> int:
    # Imported late: no other shape needs OpenTelemetry.
    from sandboxd.bench import telemetry

    _check(arguments, "count", "rounds")
    options = telemetry.Options(await _target(arguments), arguments.count, arguments.rounds, arguments.pairs)
    return await _measured(arguments, telemetry.run(options))


async def _bombs(arguments: argparse.Namespace) -> int:
    _check(arguments, "count", "bombs")
    _check_seconds(arguments)
    if arguments.backend == "fake":
        raise ConfigError("bench bombs --backend fake: its commands are plain processes of this host")
    options = bombs.Options(
        count=arguments.count,
        target=await _target(arguments),
        bombs=arguments.bombs,
        seconds=arguments.seconds,
    )
    return await _measured(arguments, bombs.run(options))


async def _starts(arguments: argparse.Namespace) -> int:
    _check(arguments, "count", "rounds")
    options = starts.Options(
        count=arguments.count,
        target=await _target(arguments),
        limits=arguments.limits,
        rounds=arguments.rounds,
    )
    return await _measured(arguments, starts.run(options))


async def _chaos(arguments: argparse.Namespace) -> int:
    _check(arguments, "count", "size", "held", kills=0)
    options = chaos.Options(
        count=arguments.count,
        target=await _target(arguments),
        seed=arguments.seed,
        kills=arguments.kills,
        held=arguments.held,
        size=arguments.size,
    )
    return await _measured(arguments, chaos.run(options))


async def _compare(arguments: argparse.Namespace) -> int:
    runs = [comparing.read(path) for path in arguments.files]
    if arguments.html:
        _write("--html", arguments.html, page.comparison(runs))
    if arguments.json:
        _write("--json", arguments.json, json.dumps(comparing.to_json(runs), indent=2) + "\n")
    comparing.show(runs)
    return 0


COMMANDS = {
    "burst": _burst,
    "sweep": _sweep,
    "ramp": _open_loop,
    "poisson": _open_loop,
    "churn": _churn,
    "soak": _soak,
    "exec": _exec,
    "fork": _fork,
    "bombs": _bombs,
    "starts": _starts,
    "chaos": _chaos,
    "telemetry": _telemetry,
    "compare": _compare,
}


def _check(arguments: argparse.Namespace, *counts: str, **least: float) -> None:
    """`counts` must be at least 1, the others at least so much. Raises ConfigError."""
    for name, bound in [*((name, 1) for name in counts), *least.items()]:
        value = getattr(arguments, name)
        if not bound <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be at least {bound:g}")
    for option, path in (("--json", arguments.json), ("--html", arguments.html)):
        # Now, and not when all is measured.
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no directory {path.parent}")
    limit = getattr(arguments, "start_limit", None)
    if limit is not None and not 1 <= limit <= START_LIMIT_MOST:
        raise ConfigError(f"--start-limit {limit}: must be from 1 to {START_LIMIT_MOST}")
    clients = getattr(arguments, "clients", 1)
    if not 1 <= clients <= CLIENTS_MOST:
        raise ConfigError(f"--clients {clients}: must be from 1 to {CLIENTS_MOST}")
    if getattr(arguments, "baseline", None) and not (arguments.image or arguments.baseline_image):
        raise ConfigError(
            "--baseline docker-sdk needs the name of an image that is there: --image NAME, or"
            " --baseline-image NAME where the backend itself uses none"
        )


def _check_seconds(arguments: argparse.Namespace) -> None:
    """How long the load lasts. Raises ConfigError."""
    if not 0 < arguments.seconds < float("inf"):
        raise ConfigError(f"--seconds {arguments.seconds:g}: must be above 0")


async def _target(arguments: argparse.Namespace) -> Target:
    """What is to be measured. Raises ConfigError, BackendUnavailable."""
    if arguments.backend == "docker" and not arguments.image:
        raise ConfigError(f"bench {arguments.shape} --backend docker needs --image NAME")
    if arguments.runtime and arguments.backend != "docker":
        raise ConfigError(f"--runtime {arguments.runtime}: only --backend docker has runtimes")
    return await _running_or_own(arguments)


async def _running_or_own(arguments: argparse.Namespace) -> Target:
    faults = _faults(getattr(arguments, "faults", None))
    address = getattr(arguments, "address", None)
    if address is None:
        if getattr(arguments, "pool", None):
            raise ConfigError(
                f"--pool {arguments.pool}: goes with --address; without it the bench has a pool of its own"
            )
        return Target(
            backend=getattr(arguments, "backend", "namespace"),
            image=arguments.image,
            runtime=getattr(arguments, "runtime", None),
            faults=faults,
            fault_seed=getattr(arguments, "fault_seed", 0),
        )
    if faults:
        raise ConfigError("--faults: a running daemon has those of its own settings; leave out --address")
    return Target(address=address, pool=await _pool(address, arguments.pool))


async def _pool(address: str, name: str | None) -> str:
    """The one to measure. Raises ConfigError where it is not clear, PoolNotFound, BackendUnavailable."""
    async with Client(address) as client:
        if name is not None:
            await client.get_pool(name)
            return name
        names = list(await client.list_pools())
    if len(names) != 1:
        raise ConfigError(f"the daemon at {address} has the pools {', '.join(names)}: name one with --pool")
    return names[0]


def _faults(text: str | None) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",")) if text else ()
    for word in words:
        try:
            Fault.parse(word)
        except ValueError as error:
            raise ConfigError(f"--faults: {error}") from None
    return words


async def _measured(
    arguments: argparse.Namespace, measuring: Awaitable[Result], baseline: Baseline | None = None
) -> int:
    """Measures, then the baseline where it is asked for, never both at once; shows and writes the result."""
    result = await measuring
    if baseline is not None and arguments.baseline:
        from sandboxd.bench import docker_sdk

        image = arguments.baseline_image or arguments.image
        result.baseline = await docker_sdk.measure(image, baseline, arguments.runtime)
    misses = slo.judge(arguments.slo, result)
    record = result.record()
    # First: whoever reads what is printed may leave.
    if arguments.json:
        _write("--json", arguments.json, json.dumps(record.model_dump(mode="json"), indent=2) + "\n")
    if arguments.html:
        _write("--html", arguments.html, page.measurement(record))
    report.show(result)
    for miss in misses:
        report.say(f"slo: {miss}")
    return int(bool(misses)) if arguments.slo else int(not result.clean)


def _write(option: str, path: Path, text: str) -> None:
    """Raises ConfigError."""
    try:
        write_json(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error
