"""A measurement as a table for a person."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from sandboxd.bench.phases import PHASES
from sandboxd.bench.result import Result, quantiles
from sandboxd.output import console

FAILURES_SHOWN = 5
MEANING = {
    "ready": "request to first command done",
    "acquire": "acquire",
    "exec": "one command",
    "exec_at_once": "one command of many at once",
    "exec_off": "one command without telemetry",
    "exec_on": "one command with it",
    "exec_beside_bombs": "one command beside bombs",
    "release": "release",
    "rollout": "one scored rollout",
    "fill": "a pool filled",
    "health": "health check meanwhile",
}
PHASE_MEANING = {
    "queue": "in the queue",
    "retry": "attempts that failed",
    "pull": "image pulled",
    "create": "created",
    "start": "started",
    "ready": "until it answers",
    "setup": "set up",
    "exec": "first command",
}
SHOWN = ("p50", "p90", "p99", "max")
GIGABYTE = 1e9
# Of all processors: with less of them taken by others a measurement is the daemon's own.
BUSY_BEFORE = 0.3


def say(text: str) -> None:
    """One line to standard output."""
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def busy_before(host_cpu: float) -> str:
    """A warning where others had the host's processors before the load began; empty where they had not."""
    if host_cpu < BUSY_BEFORE:
        return ""
    return (
        f"the host was busy to {host_cpu:.0%} before the load began: other work has a part in these figures"
    )


def show(result: Result) -> None:
    """Prints times, failures and leaks to standard output."""
    if result.steps:
        _show_sweep(result)
        return
    _show_one(result)
    if result.baseline is not None:
        say(_headline(result.baseline))
        _print(_times(result.baseline))
        say(_comparison(result, result.baseline))
    _show_troubles(result)


def show_step(result: Result) -> None:
    """One measurement of many, as soon as it is there."""
    _show_one(result)
    _show_troubles(result)


def _show_one(result: Result) -> None:
    say(_headline(result))
    _print(_times(result))
    more = result.more
    if more.get("phases") is not None:
        _print(_phases(more["phases"]))
    for line in _details(more):
        say(line)
    if (starts := more.get("starts")) is not None:
        _print(_starts(starts))
    if (offered := more.get("arrivals")) is not None:
        _print(_windows(offered["windows"]))
    if more.get("readings") is not None:
        _print(_readings(more["readings"]))
        before = more["readings"]["before"]
        if before is not None and (warning := busy_before(before["host_cpu"])):
            say(warning)
    if (clients := more.get("clients")) is not None:
        say(clients["verdict"])


def _show_troubles(result: Result) -> None:
    if result.leaked:
        say("left behind: " + ", ".join(f"{count} {kind}" for kind, count in result.leaked.items()))
    for failure in result.distinct_failures()[:FAILURES_SHOWN]:
        say(f"failure: {failure}")


def _print(table: Table) -> None:
    console().print(table)


def _show_sweep(result: Result) -> None:
    """A row for each burst."""
    columns = (
        "TARGET",
        "AT ONCE",
        *(f"READY {name}" for name in SHOWN),
        "A SECOND",
        "SERVED",
        "RETRIES",
        "ALIVE",
    )
    table = Table(*columns, box=None)
    for step in result.steps:
        summary = quantiles(step.samples.get("ready", []))
        times = ["-"] * len(SHOWN) if summary is None else [f"{summary[key]:.3f} s" for key in SHOWN]
        rate = "-" if step.rate is None else f"{step.rate:.1f}"
        success = step.more.get("success_rate") or 0.0
        row = (step.backend, str(step.count), *times, rate, f"{success:.1%}")
        table.add_row(*row, str(step.more.get("retries", 0)), str(step.alive))
    _print(table)


def _headline(result: Result) -> str:
    rate = "" if result.rate is None else f", {result.rate:.1f}/s"
    alive = "" if result.alive is None else f", {result.alive} alive after the hold"
    retries = f", {count} retries" if (count := result.more.get("retries")) else ""
    return (
        f"{result.shape} on {result.backend}: {result.successes} of {result.count} in {result.wall:.2f}"
        f" s{rate}, {len(result.failures)} failed{retries}{alive}"
    )


def _times(result: Result) -> Table:
    table = Table("", *SHOWN, box=None)
    for name, values in result.samples.items():
        if name == "ready" and result.more.get("no_exec"):
            continue  # The same as `acquire`.
        if (summary := quantiles(values)) is not None:
            table.add_row(MEANING.get(name, name), *_milliseconds(summary))
    if (health := result.more.get("health_s")) is not None:
        table.add_row(MEANING["health"], *_milliseconds(health))
    return table


def _phases(phases: dict[str, dict[str, float]]) -> Table:
    """Those that took any time."""
    table = Table("PHASE", *SHOWN, "mean", box=None)
    for name in PHASES:
        times = phases[name]
        if times["max"] > 0:
            table.add_row(PHASE_MEANING[name], *_milliseconds(times), f"{times['mean'] * 1e3:.2f} ms")
    return table


def _windows(windows: list[dict[str, Any]]) -> Table:
    table = Table("SECONDS", "OFFERED/S", "SERVED/S", "READY p50", "READY p99", "FAILED", box=None)
    for window in windows:
        ready = window["ready_s"]
        times = (
            ("-", "-") if ready is None else (f"{ready['p50'] * 1e3:.1f} ms", f"{ready['p99'] * 1e3:.1f} ms")
        )
        span = f"{window['from_s']:g} to {window['to_s']:g}"
        rates = (f"{window['offered_per_s']:.1f}", f"{window['served_per_s']:.1f}")
        table.add_row(span, *rates, *times, str(window["failed"]))
    return table


def _readings(readings: dict[str, Any]) -> Table:
    table = Table("", "HOST CPU", "MEMORY LEFT", "PIDS", "FDS", "DAEMON CPU", "MEMORY", "FDS", box=None)
    for name in ("before", "peak", "after"):
        if (one := readings[name]) is not None:
            left = f"{one['memory_available_bytes'] / GIGABYTE:.2f} GB"
            host = (f"{one['host_cpu']:.0%}", left, str(one["host_pids"]), str(one["host_fds"]))
            table.add_row(name, *host, *_daemon(one))
    return table


def _daemon(one: dict[str, Any]) -> tuple[str, str, str]:
    cpu, memory, fds = one["daemon_cpu"], one["daemon_rss_bytes"], one["daemon_fds"]
    return (
        "-" if cpu is None else f"{cpu:.0%}",
        "-" if memory is None else f"{memory / 1e6:.0f} MB",
        "-" if fds is None else str(fds),
    )


def _starts(starts: dict[str, Any]) -> Table:
    """Fixed limits, then what was found out; the medians of the rounds, and all rounds."""
    table = Table("STARTING AT ONCE", "READY/S", "OF THE BEST", "ROUNDS", box=None)
    best = statistics.median(starts["fixed_per_s"][str(starts["best"])])
    found = ", ".join(map(str, starts["adaptive_limits"]))
    for name, rates in [*starts["fixed_per_s"].items(), (f"found out: {found}", starts["adaptive_per_s"])]:
        rate = statistics.median(rates)
        rounds = " ".join(f"{each:.1f}" for each in rates)
        table.add_row(name, f"{rate:.1f}", f"{rate / best:.2f}", rounds)
    return table


def _milliseconds(summary: dict[str, float]) -> list[str]:
    return [f"{summary[key] * 1e3:.2f} ms" for key in SHOWN]


def _interval(told: dict[str, float], name: str) -> str:
    if f"{name}_low" not in told:
        return ""
    low, high, pairs = told[f"{name}_low"], told[f"{name}_high"], told["pairs"]
    return f"; {low:.1%} to {high:.1%} at 95 % by {pairs:.0f} pairs of daemons"


def _details(more: dict[str, Any]) -> list[str]:
    lines = []
    if (at_once := more.get("at_once")) is not None:
        lines.append(f"{at_once['callers']} callers at once: {at_once['rate_per_s']:.0f} commands/s")
    if (output := more.get("output")) is not None:
        lines.append(
            f"output: {output['one_mb_per_s']:.0f} MB/s through one command,"
            f" {output['many_mb_per_s']:.0f} MB/s through {output['streams']} at once"
        )
    if (bombs := more.get("bombs")) is not None:
        lines.append(f"{bombs['count']} sandboxes with bombs, {bombs['callers']} callers in the others")
    if (told := more.get("telemetry")) is not None:
        lines.append(
            f"processor time of a command: {told['off_us']:.0f} µs without telemetry,"
            f" {told['more_us']:.0f} µs more with it ({told['share']:.1%}{_interval(told, 'share')}),"
            f" {told['bytes_sent'] / 1e6:.1f} MB sent"
        )
        lines.append(
            f"one after the other: {told['off_per_s']:.0f} commands/s without telemetry,"
            f" {told['on_per_s']:.0f} with it ({told['slower']:.1%} fewer{_interval(told, 'slower')})"
        )
    if (fork := more.get("fork")) is not None:
        whole, copy, beyond = (fork[key] * 1e3 for key in ("fork_s", "copy_s", "beyond_copy_s_each"))
        lines.append(
            f"{fork['at_once']} forks of {fork['megabytes']} MB: {whole:.0f} ms, the copy alone {copy:.0f}"
            f" ms; beyond it {beyond:.1f} ms a fork"
        )
    if (chaos := more.get("chaos")) is not None:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in chaos["outcomes"].items())
        kills = ", ".join(f"{count} of {kind}" for kind, count in chaos["kills"].items())
        books = ", ".join(f"{chaos[key]} {key}" for key in ("acquired", "released", "expired", "lost"))
        lines += [f"rollouts: {outcomes}", f"kills: {kills}", f"books: {books}"]
        lines.append(f"whole again after {chaos['recovery_s']:.1f} s")
        if chaos.get("most_frequent_error"):
            lines.append(f"losses apart, most often {chaos['most_frequent_error']}")
    if (health := more.get("health")) is not None and health["late_s"] is not None:
        p50, p99 = (health["late_s"][key] * 1e3 for key in ("p50", "p99"))
        lines.append(f"health was asked late itself, by {p50:.1f} ms (p50), {p99:.1f} ms (p99)")
    if (idle := more.get("idle")) is not None:
        lines.append(
            f"a sandbox that does nothing: {idle['pss_bytes'] / 1e6:.2f} MB of its own (PSS),"
            f" {idle['cpu_share']:.4%} of a processor (most {idle['most_cpu_share']:.4%} of"
            f" {idle['sandboxes']} in {idle['seconds']:.0f} s)"
        )
    if (soak := more.get("soak")) is not None:
        lines += [_grown(name, each) for name, each in soak["growth"].items()]
    if (level := more.get("warm_level")) is not None and level["mean"] is not None:
        lines.append(f"warm: {level['mean']:.0f} on average, {level['least']} at least, of {level['target']}")
    return lines


def _grown(name: str, growth: dict[str, Any]) -> str:
    return (
        f"{name}: {growth['first']:.6g} at first, {growth['last']:.6g} at last,"
        f" {growth['per_1000_cycles']:+.3g} in 1,000 cycles (allowed {growth['bound']:.3g})"
    )


def _comparison(result: Result, baseline: Result) -> str:
    if result.rate is None or not baseline.rate:
        return "no comparison: one of the two measured nothing"
    return f"{result.rate / baseline.rate:.1f} times as many a second as {baseline.backend}"
