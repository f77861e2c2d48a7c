"""Rollouts on a host where all goes wrong: starts that fail and hang, sandboxes that die, and the kills of
launcher, daemon and a client. What is asked: each rollout ends once, as scored or as unscored by our fault.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sandboxd.bench import host
from sandboxd.bench.audit import Snapshot
from sandboxd.bench.holder import holder
from sandboxd.bench.mortal import Mortal
from sandboxd.bench.result import Result
from sandboxd.bench.session import POOL, Target, all_at_once
from sandboxd.child import toml_value
from sandboxd.client import Box, Client
from sandboxd.errors import SandboxdError, SandboxLost
from sandboxd.scratch import scratch_directory

FAULTS = ("fail start 0.2", "hang start 0.05", "die 0.004")
COMMANDS = 5
START_TIMEOUT_SECONDS = 3.0
LEASE_SECONDS = 10.0
ROLLOUT_SECONDS = 300.0
# The pool is whole again, and the dead client's leases have run out, within so long.
RECOVERY_SECONDS = 60.0
LOOK_SECONDS = 0.05
SCORED, CRASHED = "scored", "crashed"
# Of the rollouts whose sandbox was not killed under them at least this share must be scored, and of all at
# least that: where hardly any is, that none was wrong says nothing. A clean run scores 0.97 of the first.
LIVED_FLOOR, FLOOR = 0.75, 0.1
LOST = SandboxLost.reason


@dataclass(frozen=True, slots=True)
class Options:
    """`count` rollouts at once on a pool of at most `size` sandboxes; launcher and daemon are killed `kills`
    times each at moments drawn from `seed`, and a client that holds `held` leases once.
    """

    count: int
    target: Target = field(default_factory=Target)
    seed: int = 0
    kills: int = 5
    held: int = 100
    size: int = 192
    warm: int = 32

    def settings(self) -> str:
        """The daemon's settings file."""
        lines = [
            f"faults = {toml_value(list(FAULTS))}",
            f"fault_seed = {self.seed}",
            f"[pools.{POOL}]",
            f"backend = {toml_value(self.target.backend)}",
            f"warm = {self.warm}",
            f"size_limit = {self.size + self.held}",
            f"waiting_limit = {2 * (self.count + self.held)}",
            f"start_timeout_seconds = {START_TIMEOUT_SECONDS}",
        ]
        if self.target.image:
            lines.append(f"image = {toml_value(self.target.image)}")
        if self.target.runtime:
            lines.append(f"runtime = {toml_value(self.target.runtime)}")
        return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Course:
    """What became of the rollouts, by their number; `wrong` is what must never happen."""

    outcomes: dict[int, str] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    errors: dict[str, list[str]] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, number: int, outcome: str) -> None:
        if number in self.outcomes:
            self.wrong.append(f"rollout {number} ended twice")
        self.outcomes[number] = outcome
        self.moved.set()

    def failed(self, error: SandboxdError) -> str:
        """A rollout's end by this error; returns the outcome."""
        self.errors.setdefault(error.reason, []).append(error.message)
        return error.reason

    def most_frequent(self) -> str:
        """Of the errors other than losses the most frequent kind, in the words of one; empty: none."""
        kinds: dict[str, list[str]] = {}
        for reason, messages in self.errors.items():
            for message in messages if reason != LOST else ():
                kinds.setdefault(f"{reason}: {_kind(message)}", []).append(f"{reason}: {message}")
        most = max(kinds.values(), key=len, default=[])
        return f"{len(most)} {most[0]}" if most else ""

    def verdict(self, count: int) -> list[str]:
        """What is wrong with how many of `count` rollouts were scored, if anything is."""
        ends = Counter(self.outcomes.values())
        scored, lived = ends[SCORED], count - ends[LOST]
        if scored >= LIVED_FLOOR * lived and scored >= FLOOR * count:
            return []
        why = f"; most often {most}" if (most := self.most_frequent()) else ""
        floors = f"{LIVED_FLOOR:.0%} of these and {FLOOR:.0%} of all"
        told = f"{scored} of {count} rollouts were scored, {lived} kept their sandbox"
        return [f"{told}: at least {floors} are to be{why}"]


def _kind(message: str) -> str:
    """What messages have in common that differ in names and numbers."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f.]*", "#", message)


async def run(options: Options) -> Result:
    """Plays on a daemon of its own. Raises BackendUnavailable when that cannot be started."""
    result, course = Result("chaos", options.target.name, options.count), Course()
    with scratch_directory("sandboxd-bench-") as directory:
        config = directory / "bench.toml"
        config.write_text(options.settings())
        daemon = Mortal(directory / "state", config, log=directory / "daemon.log")
        result.host = host.facts()
        before = Snapshot.take(daemon.state)
        try:
            async with Client(await daemon.start(), patience=60.0) as client:
                began = time.perf_counter()
                await _play(client, daemon, options, course)
                result.wall = time.perf_counter() - began
                result.more["chaos"] = await _settle(client, options, course)
        finally:
            await daemon.stop()
        result.leaked = Snapshot.take(daemon.state).since(before)
    _judge(course, options, result)
    return result


async def _play(client: Client, daemon: Mortal, options: Options, course: Course) -> None:
    async with holder(client.address, POOL, options.held, LEASE_SECONDS) as other:
        troubles = asyncio.create_task(_trouble(daemon, options, course, other.kill))
        try:
            await all_at_once(range(options.count), lambda number: _rollout(client, number, course))
            # The last moments may be drawn close to the end.
            await asyncio.wait_for(troubles, RECOVERY_SECONDS)
        finally:
            troubles.cancel()
            await asyncio.wait([troubles])


async def _trouble(daemon: Mortal, options: Options, course: Course, dies: Callable[[], None]) -> None:
    """Strikes when so many rollouts have ended, a moment later."""
    draw = random.Random(options.seed)
    kinds = ["launcher"] * options.kills + ["daemon"] * options.kills + ["client"]
    moments = sorted(draw.randrange(options.count) for _ in kinds)
    draw.shuffle(kinds)
    for moment, kind in zip(moments, kinds, strict=True):
        while len(course.outcomes) < moment:
            course.moved.clear()
            await course.moved.wait()
        await asyncio.sleep(draw.random() * LOOK_SECONDS)
        if kind == "daemon":
            await daemon.kill()
            await daemon.start()
        elif kind == "client":
            dies()
        elif options.target.backend == "namespace":
            await daemon.kill_launcher()
        course.kills.append(kind)


async def _rollout(client: Client, number: int, course: Course) -> None:
    outcome, began = CRASHED, time.perf_counter()
    try:
        async with client.acquire(POOL, ttl=LEASE_SECONDS, timeout=ROLLOUT_SECONDS) as box:
            await _use(box, number, course)
        outcome = SCORED
        course.seconds.append(time.perf_counter() - began)
    except SandboxdError as error:
        outcome = course.failed(error)
        if not error.mask:
            course.wrong.append(f"rollout {number}: {error.reason} blames the task: {error}")
    finally:
        course.ended(number, outcome)


async def _use(box: Box, number: int, course: Course) -> None:
    """Commands whose answers are known, in a sandbox that nobody had before."""
    if box.name in course.holders:
        course.wrong.append(f"{box.name} was leased to rollouts {course.holders[box.name]} and {number}")
    course.holders[box.name] = number
    for step in range(COMMANDS):
        script = f"ls; echo {number} >step-{step}; echo $(({number} * {step}))"
        done = await box.exec(["sh", "-c", script], timeout=60, output_limit=16 << 10)
        files = "".join(f"step-{earlier}\n" for earlier in range(step))
        if not done.ok or done.stdout.decode() != f"{files}{number * step}\n":
            course.wrong.append(
                f"rollout {number}, step {step}: {done.reason} {done.exit_code} {done.detail}:"
                f" {done.stdout!r} {done.stderr!r}"
            )


async def _settle(client: Client, options: Options, course: Course) -> dict[str, Any]:
    """Waits until the pool is as before, and checks its books."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    began = time.perf_counter()
    stats = await client.get_pool(POOL)
    while stats.active or stats.deleting or stats.waiting or stats.warm < options.warm:
        if time.monotonic() > deadline:
            course.wrong.append(f"the pool is not whole after {RECOVERY_SECONDS:g} s: {stats}")
            break
        await asyncio.sleep(LOOK_SECONDS)
        stats = await client.get_pool(POOL)
    ended = stats.released_total + stats.expired_total + stats.lost_total
    if stats.acquired_total != ended:
        course.wrong.append(f"the books do not close: {stats.acquired_total} acquired, {ended} ended")
    return {
        "seed": options.seed,
        "kills": dict(Counter(course.kills)),
        "outcomes": dict(Counter(course.outcomes.values()).most_common()),
        "acquired": stats.acquired_total,
        "released": stats.released_total,
        "expired": stats.expired_total,
        "lost": stats.lost_total,
        "start_failures": stats.start_failures_total,
        "most_frequent_error": course.most_frequent(),
        "recovery_s": time.perf_counter() - began,
    }


def _judge(course: Course, options: Options, result: Result) -> None:
    missing = set(range(options.count)) - set(course.outcomes)
    result.samples["rollout"] = course.seconds
    crashed = [number for number, outcome in course.outcomes.items() if outcome == CRASHED]
    result.failures = [
        *course.verdict(options.count),
        *course.wrong,
        *(f"rollout {number} never ended" for number in sorted(missing)),
        *(f"rollout {number} crashed" for number in crashed),
    ]
