"""A measurement as a table for a person."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from sandboxd.bench.result import Result, quantiles

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
SHOWN = ("p50", "p90", "p99", "max")


def show(result: Result) -> None:
    """Prints times, failures and leaks to standard output."""
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(_headline(result))
    console.print(_times(result))
    for line in _details(result.more):
        say(line)
    if (starts := result.more.get("starts")) is not None:
        console.print(_starts(starts))
    if result.baseline is not None:
        say(_headline(result.baseline))
        console.print(_times(result.baseline))
        say(_comparison(result, result.baseline))
    if result.leaked:
        say("left behind: " + ", ".join(f"{count} {kind}" for kind, count in result.leaked.items()))
    for failure in result.distinct_failures()[:FAILURES_SHOWN]:
        say(f"failure: {failure}")


def _headline(result: Result) -> str:
    rate = "" if result.rate is None else f", {result.rate:.1f}/s"
    alive = "" if result.alive is None else f", {result.alive} alive after the hold"
    return (
        f"{result.shape} on {result.backend}: {result.successes} in {result.wall:.2f} s{rate},"
        f" {len(result.failures)} failed{alive}"
    )


def _times(result: Result) -> Table:
    table = Table("", *SHOWN, box=None)
    for name, values in result.samples.items():
        if (summary := quantiles(values)) is not None:
            table.add_row(MEANING.get(name, name), *_milliseconds(summary))
    if (health := result.more.get("health_s")) is not None:
        table.add_row(MEANING["health"], *_milliseconds(health))
    return table


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
            f" {told['more_us']:.0f} µs more with it ({told['share']:.1%}),"
            f" {told['bytes_sent'] / 1e6:.1f} MB sent"
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
    if (health := more.get("health")) is not None and health["late_s"] is not None:
        p50, p99 = (health["late_s"][key] * 1e3 for key in ("p50", "p99"))
        lines.append(f"health was asked late itself, by {p50:.1f} ms (p50), {p99:.1f} ms (p99)")
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
