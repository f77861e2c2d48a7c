"""Runs many cells in as many processes as there are cores, and puts equal ones together."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from rl.bench.arms import Cell
from rl.bench.cell import Outcome, run_cell
from rl.bench.plant import SCRATCH_PREFIX
from sandboxd.scratch import scratch_directory

MEANS = (
    "step_seconds", "tokens_per_second", "wait_ratio", "generator_idle", "generator_use", "wasted",
    "staleness_mean", "length_bias", "late_share", "virtual_seconds", "processor_seconds",
)  # fmt: skip
BASELINE = "sync"


def sweep(
    cells: Sequence[Cell], say: Callable[[int, Outcome], None], processes: int | None = None
) -> list[Outcome]:
    """The outcomes of all cells, in their order, those that differ in the seed alone as one.

    `say` hears how many are done, and the last of them. Raises what a cell raises.
    """
    found: dict[int, Outcome] = {}
    count = min(processes or os.cpu_count() or 1, len(cells))
    # Spawned: this program's libraries have threads, which a fork would lose in the midst of their work.
    spawn = multiprocessing.get_context("spawn")
    with (
        scratch_directory(SCRATCH_PREFIX) as directory,
        ProcessPoolExecutor(count, spawn, _begin, (str(directory),)) as pool,
    ):
        others = set(multiprocessing.active_children())
        try:
            jobs = {pool.submit(run_cell, cell): number for number, cell in enumerate(cells)}
            for job in as_completed(jobs):
                found[jobs[job]] = job.result()
                say(len(found), job.result())
        except BaseException:
            # Nobody will ask for what they still compute, which may take a minute.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return compared(merged(found[number] for number in range(len(cells))))


def _begin(directory: str) -> None:
    """Begins a process, whose files are to lie in `directory`: it may be killed, but that will be removed."""
    tempfile.tempdir = directory
    # Of the terminal's Ctrl-C the other process hears, too, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Looking for cyclic garbage that is hardly there took a third of a run's time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _end_with_parent() -> None:
    """A process of a pool waits for work for ever when the one that gives it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def merged(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """One outcome for each arm and world: means, the largest staleness, sums of what was discarded."""
    alike: defaultdict[tuple[str, float, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        alike[outcome.arm, *outcome.world].append(outcome)
    return [_mean(several) for several in alike.values()]


def _mean(several: Sequence[Outcome]) -> Outcome:
    means = {name: sum(getattr(each, name) for each in several) / len(several) for name in MEANS}
    discarded: Counter[str] = Counter()
    for each in several:
        discarded.update(each.discarded)
    return replace(
        several[0],
        **means,
        runs=len(several),
        steps=sum(each.steps for each in several),
        staleness_max=max(each.staleness_max for each in several),
        ledger_closed=all(each.ledger_closed for each in several),
        start_failures=sum(each.start_failures for each in several),
        discarded=dict(sorted(discarded.items())),
    )


def compared(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """With their speedups over the synchronous arm of the same world; 0 where that was not run."""
    base = {each.world: each for each in outcomes if each.arm == BASELINE}
    return [
        replace(
            each,
            speedup=base[each.world].step_seconds / each.step_seconds,
            speedup_tokens=each.tokens_per_second / base[each.world].tokens_per_second,
        )
        if each.world in base
        else each
        for each in outcomes
    ]
