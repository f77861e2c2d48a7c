"""The `sandboxd` command: reads the arguments, runs one of the parts, and turns faults into one line.

Exit codes: 0 done; 1 the work failed; 2 the command or the configuration cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import uvloop

from sandboxd import __version__, beginning, commands, image_commands, inspect_command, pool_commands
from sandboxd.bench import cli as bench_cli
from sandboxd.command_line import check_address, given_path, until_told
from sandboxd.config import Config, ConfigError, load
from sandboxd.errors import BackendUnavailable, SandboxdError
from sandboxd.examples import add_examples
from sandboxd.images.store import ImageError
from sandboxd.lifetime import end_with_parent
from sandboxd.output import Parser, add_json, take_any_text
from sandboxd.telemetry.command import Ended, traced, unheard
from sandboxd.telemetry.log_lines import Formatter
from sandboxd.telemetry.settings import wanted

EXAMPLES = """examples:
  sandboxd serve                               pools on this host, on the user's own socket
  sandboxd exec python -- python3 -c 'print(6*7)'
  sandboxd exec -t python -- bash
  sandboxd ls                                  leased and warm sandboxes
  sandboxd top                                 what the pools do, as they do it
  sandboxd inspect --failures                  why sandboxes failed of late
  sandboxd pool set python --warm 64           keep more of them ready
  sandboxd prewarm python 256 --by 30          256 will be wanted in 30 s
  sandboxd image import docker:python:3.12 --name py312
  sandboxd bench burst --count 960             start 960 at once and measure
  sandboxd doctor                              what this host lacks, and how to get it

exit codes: 0 done, 1 the work failed, 2 the command or the configuration cannot be used
"""


# For a person; the errors' own messages, which programs of any language show, name no command.
WAYS_OUT = {
    "START_FAILED": "`sandboxd inspect --failures` has its last lines",
    "ACQUIRE_TIMED_OUT": "`sandboxd top` shows who holds and who waits; wait longer with --wait S",
    "QUEUE_FULL": "`sandboxd top` shows who holds and who waits; ask again later",
    "SANDBOX_NOT_FOUND": "`sandboxd ls` lists them",
    "SANDBOX_LOST": "`sandboxd inspect --failures` says of what",
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sandboxd",
        description="Pools of warm, isolated sandboxes for agentic reinforcement learning.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sandboxd {__version__}")
    parts = parser.add_subparsers(dest="part", required=True, metavar="COMMAND")
    _add_serve(parts)
    _add_exec(parts)
    _add_listings(parts)
    _add_images(parts)
    bench_cli.add(parts)
    _add_doctor(parts)
    _add_completion(parts)
    add_examples(parser)
    return parser


def _add_serve(parts: Any) -> None:
    serve = parts.add_parser("serve", help="run the daemon until Ctrl-C or SIGTERM")
    serve.add_argument(
        "--config", type=given_path, metavar="FILE", help="settings in TOML (docs/configuration.md)"
    )
    serve.add_argument("--state-dir", type=given_path, metavar="DIR", help="sockets and sandboxes go here")
    serve.add_argument(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help="unix:/path or host:port; may be given more than once",
    )
    serve.add_argument("--metrics", metavar="HOST:PORT", help="let Prometheus scrape the metrics here")
    serve.add_argument("--web", metavar="HOST:PORT", help="show a live page here (docs/operations.md)")
    serve.add_argument(
        "--web-token-file", type=given_path, metavar="FILE", help="whoever knows its line may act on the page"
    )
    serve.add_argument(
        "--web-run",
        action="append",
        type=given_path,
        metavar="DIR",
        help="a training run for the page, as in runs/demo; may be given more than once",
    )
    serve.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    serve.add_argument(
        "--with-parent", action="store_true", help="stop when the process that started it ends"
    )
    serve.add_argument(
        "--faults",
        metavar="LIST",
        help='faults on purpose, as in "fail start 0.2, die 0.02" (docs/configuration.md)',
    )
    serve.set_defaults(run=_serve)


def _add_exec(parts: Any) -> None:
    run = parts.add_parser("exec", help="lease a sandbox, run one command in it, release it")
    _add_address(run)
    run.add_argument("-i", "--interactive", action="store_true", help="pass on standard input as it comes")
    run.add_argument("-t", "--tty", action="store_true", help="run on a terminal like this one; implies -i")
    run.add_argument("-u", "--user", metavar="USER", help="run as NAME, UID, NAME:GROUP or UID:GID")
    run.add_argument("--timeout", type=float, metavar="S", help="kill the command after S seconds")
    run.add_argument("--wait", type=float, default=60.0, metavar="S", help="wait S seconds for a sandbox")
    add_json(run, "one JSON object: how it ended and what it printed")
    run.add_argument("pool", metavar="POOL")
    run.add_argument("argv", nargs="+", metavar="CMD", help="the program and its arguments, after --")
    run.set_defaults(run=commands.execute)


def _add_listings(parts: Any) -> None:
    listing = parts.add_parser("ls", help="list sandboxes")
    _add_address(listing)
    listing.add_argument("--pool", metavar="POOL", help="only this pool's")
    add_json(listing, "one JSON object a line")
    listing.set_defaults(run=commands.list_sandboxes)
    inspect = parts.add_parser("inspect", help="all that is known of a sandbox, or why sandboxes failed")
    _add_address(inspect)
    inspect.add_argument("--failures", action="store_true", help="the last failures, of all pools or of one")
    add_json(inspect, "one JSON object a line")
    inspect.add_argument("name", nargs="?", metavar="NAME", help="the sandbox; with --failures the pool")
    inspect.set_defaults(run=inspect_command.inspect)
    pool = parts.add_parser("pool", help="list pools, or change one")
    actions = pool.add_subparsers(dest="action", required=True, metavar="ls|set")
    pools = actions.add_parser("ls", help="list pools with their counts")
    _add_address(pools)
    add_json(pools, "one JSON object a line")
    pools.set_defaults(run=commands.list_pools)
    change = actions.add_parser("set", help="change a pool until the daemon restarts")
    _add_address(change)
    change.add_argument("pool", metavar="POOL")
    change.add_argument("--warm", type=int, metavar="N", help="sandboxes kept ready")
    change.add_argument("--size-limit", type=int, metavar="N", help="sandboxes that may exist at once")
    add_json(change)
    change.set_defaults(run=commands.set_pool)
    reload = parts.add_parser("reload", help="have the daemon read its settings file again")
    _add_address(reload)
    add_json(reload)
    reload.set_defaults(run=pool_commands.reload)
    top = parts.add_parser("top", help="show what the live page shows, as it changes, until Ctrl-C")
    _add_address(top)
    top.add_argument("--pool", metavar="POOL", help="only this pool's")
    top.add_argument(
        "--interval", type=float, default=0.5, metavar="S", help="once in S seconds at most (0.5)"
    )
    top.add_argument(
        "--run",
        action="append",
        default=[],
        type=Path,
        dest="run_directories",
        metavar="DIR",
        help="a training run, as in runs/demo; may be given more than once",
    )
    top.add_argument("--once", action="store_true", help="show them once")
    add_json(top, "one JSON object a line")
    top.set_defaults(run=_top)
    prewarm = parts.add_parser("prewarm", help="announce that sandboxes will be wanted")
    _add_address(prewarm)
    prewarm.add_argument("pool", metavar="POOL")
    prewarm.add_argument("count", type=int, metavar="COUNT", help="so many; 0 withdraws what --id announced")
    prewarm.add_argument("--by", type=float, default=0.0, metavar="S", help="wanted in S seconds (0)")
    prewarm.add_argument("--grace", type=float, default=60.0, metavar="S", help="kept S seconds longer (60)")
    prewarm.add_argument("--id", metavar="ID", help="change or withdraw what was announced as ID")
    add_json(prewarm)
    prewarm.set_defaults(run=pool_commands.prewarm)


def _add_images(parts: Any) -> None:
    image = parts.add_parser("image", help="import images for the namespace backend, list and remove them")
    actions = image.add_subparsers(dest="action", required=True, metavar="import|ls|rm|gc")
    add = actions.add_parser("import", help="unpack an image into the store")
    add.add_argument(
        "source",
        metavar="SOURCE",
        help="a file (docker save, an OCI archive, a root file system's tar), - for standard input,"
        " or docker:IMAGE of this host's Engine",
    )
    add.add_argument("--name", required=True, metavar="NAME", help="what pools call it: image = NAME")
    add_json(add)
    add.set_defaults(run=image_commands.add)
    listing = actions.add_parser("ls", help="list images")
    add_json(listing, "one JSON object a line")
    listing.set_defaults(run=image_commands.show)
    drop = actions.add_parser("rm", help="remove an image that no sandbox uses")
    drop.add_argument("name", metavar="NAME")
    add_json(drop)
    drop.set_defaults(run=image_commands.drop)
    collect = actions.add_parser("gc", help="remove layers of no image, and what broken-off imports left")
    add_json(collect)
    collect.set_defaults(run=image_commands.collect)
    for parser in (add, listing, drop, collect):
        parser.add_argument(
            "--images-dir", type=given_path, metavar="DIR", help="the store (SANDBOXD_IMAGES_DIR)"
        )


def _add_doctor(parts: Any) -> None:
    doctor = parts.add_parser("doctor", help="check this host for what a thousand sandboxes need")
    doctor.add_argument(
        "--config", type=given_path, metavar="FILE", help="check for the pools of these settings"
    )
    doctor.add_argument(
        "--state-dir", type=given_path, metavar="DIR", help="sockets and sandboxes would go here"
    )
    doctor.add_argument("--count", type=int, metavar="N", help="sandboxes, without --config (960)")
    doctor.add_argument("--backend", choices=["namespace", "docker"], help="of these, without --config")
    add_json(doctor)
    doctor.set_defaults(run=_doctor)


def _add_completion(parts: Any) -> None:
    completion = parts.add_parser(
        "completion",
        help="print what has a shell complete commands, options and file names",
        description='bash: eval "$(sandboxd completion bash)"; zsh: the same, after compinit;'
        " fish: sandboxd completion fish | source",
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(run=_completion)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", metavar="ADDRESS", help="the daemon's unix:/path or host:port (SANDBOXD_ADDRESS)"
    )


async def _top(arguments: argparse.Namespace) -> int:
    # Imported late: tables that live are of use to no other part.
    from sandboxd.top import top

    return await top(arguments)


async def _doctor(arguments: argparse.Namespace) -> int:
    # Imported late: the other parts look at no host, and start faster without.
    from sandboxd.doctor.command import run

    return await run(arguments)


async def _completion(arguments: argparse.Namespace) -> int:
    # Imported late, as above.
    from sandboxd.completion import script

    print(script(_parser(), arguments.shell))
    return 0


def _is_no_broken_call(record: logging.LogRecord) -> bool:
    """False for gRPC's word, with a traceback, that a client died under a message to it: no fault here."""
    return "ExecuteBatchError" not in record.getMessage()


async def _serve(arguments: argparse.Namespace) -> int:
    # Imported late: the other parts need no server, and start faster without.
    from sandboxd.daemon import Control, serve

    if arguments.with_parent:
        end_with_parent()

    def read() -> Config:
        return load(
            arguments.config,
            state_dir=arguments.state_dir,
            listen=arguments.listen,
            metrics=arguments.metrics,
            web=arguments.web,
            web_token_file=arguments.web_token_file,
            web_runs=arguments.web_run,
            log_level=arguments.log_level,
            # Whoever held its leases was the parent, and has ended.
            drain_seconds=0.0 if arguments.with_parent else None,
            faults=arguments.faults.split(",") if arguments.faults else None,
        )

    config = read()
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_broken_call)
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level, handlers=[lines])
    control = Control(
        read if arguments.config else None,
        applied=lambda config: logging.getLogger().setLevel(config.log_level),
    )
    await serve(
        config,
        control,
        ready=lambda addresses: _say_ready(config, addresses, control.page),
        telemetry=wanted(config.metrics),
    )
    return 0


def _say_ready(config: Config, addresses: list[str], where: str | None) -> None:
    pools = ", ".join(f"{name} ({pool.backend}, {pool.warm} warm)" for name, pool in config.pools.items())
    page = f"; page: http://{where}/" if where else ""
    print(f"sandboxd {__version__} serving {' '.join(addresses)}; pools: {pools}{page}", flush=True)


def _traced(arguments: argparse.Namespace) -> AbstractContextManager[Ended]:
    """A span for what asks a daemon and ends by itself: what measures or watches is no part of a trace."""
    if not hasattr(arguments, "address") or arguments.part in ("bench", "top"):
        return contextlib.nullcontext(unheard)
    return traced(" ".join(("sandboxd", arguments.part, *getattr(arguments, "action", "").split())))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]] = arguments.run
    try:
        beginning.over()
        take_any_text()
        check_address(arguments)
        with _traced(arguments) as ended:
            # Calls and commands cost a fifth less processor time on it than on asyncio's own loop.
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                code = runner.run(until_told(run(arguments)))
            ended(code)
        return code
    except ConfigError as error:
        print(f"sandboxd: {error}", file=sys.stderr)
        return 2
    except BackendUnavailable as error:
        hint = "; start one with `sandboxd serve`, or name another with --address"
        # A bench without an address has a daemon of its own.
        asked = hasattr(arguments, "address") and (arguments.part != "bench" or arguments.address)
        print(f"sandboxd: {error}{hint if asked else ''}", file=sys.stderr)
        return 2
    except ImageError as error:
        print(f"sandboxd: {error}", file=sys.stderr)
        return 1
    except SandboxdError as error:
        way_out = f"; {WAYS_OUT[error.reason]}" if error.reason in WAYS_OUT else ""
        print(f"sandboxd: {error.reason}: {error}{way_out}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("sandboxd: interrupted", file=sys.stderr)
        return 1
