"""Puts a run together from its settings (daemon, engines, session), and writes down what came of it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rl import tracing
from rl.config import Config, metrics_protocol, traces_protocol
from rl.engines import open_engines
from rl.heap import settled
from rl.ledger import Ledger
from rl.progress import Progress
from rl.report import write_report
from rl.sandboxes import leases_ended, own_daemon
from rl.session import Leasing, Session
from rl.start import Start
from rl.summary import check_sandboxes, summarise
from rl.tasks import (
    TaskSource,
    UnknownFamily,
    build_held_out,
    builtin_families,
    load_family,
    shipped_families,
)
from rl.telemetry import exported
from sandboxd import Client

LEASES_SECONDS = 30.0
"""A run waits no longer at its end for leases that were not given back to run out."""


async def run(config: Config, start: Start, progress: Progress, began: float) -> dict[str, Any]:
    """Trains and measures; returns the summary, which lies in the run's directory beside the report.

    `began` is when the program started, on time.monotonic: a time limit counts from there. Raises
    ConfigError before anything costly, and after the report is written LedgerError, or CheckpointFailed when
    what was trained last is not saved.
    """
    source = task_source(config)
    held_out = build_held_out(source, per_kind=config.heldout.per_kind, per_level=config.heldout.per_level)
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.exported(traces_protocol(), config.name))
        address = config.sandboxes.address
        if not address:
            progress.say("starting the sandbox daemon")
            address = await stack.enter_async_context(own_daemon(config.sandboxes, config.directory))
        control = await stack.enter_async_context(Client(address))
        before = await control.get_pool(config.sandboxes.pool)
        engines = await stack.enter_async_context(open_engines(config, start, progress))
        session = Session(config, start, progress, began)
        telemetry = stack.enter_context(exported(metrics_protocol(), config.name))
        session.telemetry = telemetry
        ledger = Ledger(start.state.ledger if start.state else None)
        stack.enter_context(settled())
        async with Client(address) as client:
            results = await session.play(engines, Leasing(control, client), ledger, (source, held_out))
        own = not config.sandboxes.address
        within = min(config.sandboxes.ttl_seconds + 1.0, LEASES_SECONDS) if own else 0.0
        after = await leases_ended(control, config.sandboxes.pool, within=within)
        progress.say("stopping the processes")
    summary = summarise(config, results, ledger, (before, after))
    directory = config.directory
    await asyncio.to_thread(_write_results, directory, summary)
    ledger.check()
    if not config.sandboxes.address:
        check_sandboxes(before, after)
    if session.unsaved is not None:
        raise session.unsaved
    return summary


def _write_results(directory: Path, summary: dict[str, Any]) -> None:
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(directory)


def task_source(config: Config) -> TaskSource:
    """The families that the settings name. Raises UnknownFamily."""
    shipped = shipped_families()
    names = config.families or [family.name for family in builtin_families()]
    for name in names:
        if name not in shipped and ":" not in name:
            raise UnknownFamily(
                f"no task family {name!r}: there are {', '.join(shipped)}, and your own by the name of"
                " package.module:Class"
            )
    return TaskSource(shipped[name] if name in shipped else load_family(name) for name in names)
