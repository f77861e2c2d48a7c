"""The arguments of `sandboxd bench`. Imports nothing that measures: the other commands start without it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxd.output import add_json_file, tables_aside

if TYPE_CHECKING:
    from sandboxd.bench.slo import Term

Run = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]

CODES = """exit codes: 0 done; 1 something failed or was left behind (--slo: a term was missed);
2 cannot be measured
"""


def add(parts: Any) -> None:
    """The part `bench` of the command."""
    bench = parts.add_parser(
        "bench",
        help="measure how fast sandboxes start and run commands, under which load",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "burst|sweep|ramp|poisson|churn|soak|exec|fork|bombs|starts|chaos|telemetry|compare"
    shapes = bench.add_subparsers(dest="shape", required=True, metavar=names)
    for add_shape in (_burst, _sweep, _ramp, _poisson, _churn, _soak, _exec, _fork, _bombs, _starts, _chaos):
        add_shape(shapes)
    _telemetry(shapes)
    _compare(shapes)


def _burst(shapes: Any) -> None:
    burst = _shape(shapes, "burst", "N callers ask at once for a sandbox each")
    _count(burst, "--count", 96, "callers")
    _held(burst)
    burst.add_argument("--no-exec", action="store_true", help="lease only, run no command")
    _running(burst)
    _clients(burst)
    _baseline(burst)


def _sweep(shapes: Any) -> None:
    sweep = shapes.add_parser("sweep", help="a burst of each of these sizes, on each of these targets")
    sweep.add_argument(
        "counts", type=_numbers, nargs="?", default=[96, 192, 480, 960], metavar="N,…",
        help="callers at once (96,192,480,960)",
    )  # fmt: skip
    sweep.add_argument(
        "--targets", default="namespace", metavar="LIST",
        help="namespace, docker, docker/RUNTIME, docker-sdk (the bare SDK), with commas between (namespace)",
    )  # fmt: skip
    sweep.add_argument("--image", metavar="NAME", help="image of the containers")
    _held(sweep)
    _faults(sweep)
    _running(sweep)
    _clients(sweep)
    _output(sweep)
    sweep.set_defaults(run=_late("sweep"))


def _ramp(shapes: Any) -> None:
    ramp = _shape(shapes, "ramp", "more and more callers a second, served or not")
    ramp.add_argument("--from", dest="first", type=float, default=1.0, metavar="R", help="a second (1)")
    ramp.add_argument("--to", dest="last", type=float, default=50.0, metavar="R", help="a second (50)")
    _open_loop(ramp)


def _poisson(shapes: Any) -> None:
    poisson = _shape(shapes, "poisson", "callers come at random, served or not")
    poisson.add_argument(
        "--rate", dest="last", type=float, default=20.0, metavar="R", help="a second, on average (20)"
    )
    poisson.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (0)")
    _open_loop(poisson)


def _churn(shapes: Any) -> None:
    churn = _shape(shapes, "churn", "acquire, run a command, release, over and over")
    _count(churn, "--callers", 8, "callers at once")
    _count(churn, "--warm", 64, "sandboxes kept ready")
    churn.add_argument("--seconds", type=float, default=10.0, metavar="S", help="for so long (10)")
    churn.add_argument("--start-limit", type=int, metavar="N", help="sandboxes starting at once")
    _running(churn)
    _clients(churn)
    _baseline(churn)


def _soak(shapes: Any) -> None:
    soak = _shape(shapes, "soak", "the same so many times: memory, descriptors and latency stay")
    _count(soak, "--cycles", 100_000, "in all")
    _count(soak, "--callers", 16, "callers at once")
    _running(soak)


def _exec(shapes: Any) -> None:
    run = _shape(shapes, "exec", "commands and their output in warm sandboxes")
    _count(run, "--count", 1000, "commands")
    _count(run, "--concurrency", 64, "callers at once")
    _count(run, "--streams", 32, "commands that print at once")
    _count(run, "--output-mb", 200, "megabytes printed in all")
    _running(run)
    _baseline(run)


def _fork(shapes: Any) -> None:
    fork = _shape(shapes, "fork", "sandboxes that begin where another is, which holds so much")
    _count(fork, "--count", 8, "forks at once")
    _count(fork, "--megabytes", 1, "what is copied")
    _count(fork, "--rounds", 5, "so many times")
    _running(fork)


def _telemetry(shapes: Any) -> None:
    told = _shape(shapes, "telemetry", "commands of a daemon with telemetry and of one without", faults=False)
    _count(told, "--count", 100, "commands a turn")
    _count(told, "--rounds", 10, "turns of each daemon")
    _count(told, "--pairs", 8, "daemons of each kind, one after the other")


def _bombs(shapes: Any) -> None:
    bombs = _shape(shapes, "bombs", "sandboxes that fill all they may, beside others that work", faults=False)
    _count(bombs, "--count", 100, "sandboxes that work")
    _count(bombs, "--bombs", 10, "sandboxes that do their worst")
    bombs.add_argument("--seconds", type=float, default=10.0, metavar="S", help="without and with bombs (10)")


def _starts(shapes: Any) -> None:
    about = "a pool filled with so many starting at once, and with as many as is found out"
    starts = _shape(shapes, "starts", about, faults=False)
    _count(starts, "--count", 200, "sandboxes")
    _count(starts, "--rounds", 3, "so many times for each limit")
    starts.add_argument(
        "--limits", type=_limits, default=[1, 2, 4, 8, 16, 32, 64], metavar="N,…",
        help="starting at once (1,2,4,8,16,32,64)",
    )  # fmt: skip


def _chaos(shapes: Any) -> None:
    about = "rollouts while sandboxes fail, daemon and launcher are killed"
    chaos = _shape(shapes, "chaos", about, faults=False)
    _count(chaos, "--count", 960, "rollouts at once")
    _count(chaos, "--size", 192, "sandboxes for them")
    chaos.add_argument("--kills", type=int, default=5, metavar="N", help="of daemon and launcher each (5)")
    _count(chaos, "--held", 100, "leases of a client that dies")
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults and moments (0)")


def _compare(shapes: Any) -> None:
    compare = shapes.add_parser("compare", help="measurements that --json has written, beside each other")
    compare.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="the first is what others are compared with"
    )
    add_json_file(compare)
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    compare.set_defaults(run=_late("compare"))


def _shape(shapes: Any, name: str, about: str, *, faults: bool = True) -> Any:
    shape = shapes.add_parser(name, help=about)
    shape.add_argument("--backend", choices=["namespace", "docker", "fake"], default="namespace")
    shape.add_argument("--image", metavar="NAME", help="image of the sandboxes (needed for docker)")
    shape.add_argument("--runtime", metavar="NAME", help="runtime of the containers: runsc, say (docker)")
    if faults:
        _faults(shape)
    _output(shape)
    shape.set_defaults(run=_late(name))
    return shape


def _output(shape: Any) -> None:
    add_json_file(shape)
    shape.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    shape.add_argument(
        "--slo",
        type=_terms,
        default=[],
        metavar="TERMS",
        help='what must hold, as in "p99_ready<2s,failed=0": sets the exit code',
    )


def _count(shape: Any, option: str, default: int, about: str) -> None:
    shape.add_argument(option, type=int, default=default, metavar="N", help=f"{about} ({default})")


def _held(shape: Any) -> None:
    shape.add_argument("--start-limit", type=int, metavar="N", help="sandboxes starting at once")
    shape.add_argument(
        "--hold", type=float, default=0.0, metavar="S", help="hold all for S seconds, then look again (0)"
    )
    shape.add_argument("--warm", action="store_true", help="fill the pool first; cold without")


def _open_loop(shape: Any) -> None:
    shape.add_argument("--seconds", type=float, default=10.0, metavar="S", help="for so long (10)")
    shape.add_argument(
        "--hold", type=float, default=0.0, metavar="S", help="each keeps its sandbox for S seconds (0)"
    )
    shape.add_argument("--warm", type=int, default=16, metavar="N", help="sandboxes kept ready (16)")
    _running(shape)
    _clients(shape)


def _running(shape: Any) -> None:
    shape.add_argument(
        "--address", metavar="ADDRESS", help="measure the daemon that runs there; one of its own without"
    )
    shape.add_argument("--pool", metavar="POOL", help="with --address: the pool (if it has more than one)")


def _clients(shape: Any) -> None:
    shape.add_argument("--clients", type=int, default=1, metavar="N", help="client processes (1)")


def _faults(shape: Any) -> None:
    shape.add_argument("--faults", metavar="LIST", help='faults on purpose, as in "fail start 0.2, die 0.02"')
    shape.add_argument("--fault-seed", type=int, default=0, metavar="N", help="what they are drawn from (0)")


def _baseline(shape: Any) -> None:
    shape.add_argument("--baseline", choices=["docker-sdk"], help="the same on the bare Docker SDK, after it")
    shape.add_argument("--baseline-image", metavar="NAME", help="image of the baseline's containers")


def _late(name: str) -> Run:
    async def run(arguments: argparse.Namespace) -> int:
        from sandboxd.bench import commands

        with tables_aside(arguments.json):
            return await commands.COMMANDS[name](arguments)

    return run


def _terms(text: str) -> list[Term]:
    from sandboxd.bench import slo

    try:
        return slo.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limits(text: str) -> list[int]:
    return _numbers(text, 1024)


def _numbers(text: str, most: int = 100_000) -> list[int]:
    numbers = [int(word) for word in text.split(",") if word.isdecimal()]
    if len(numbers) != len(text.split(",")) or not all(1 <= number <= most for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 1 to {most} with commas between them")
    return numbers
