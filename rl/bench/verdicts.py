"""What the sweep must show, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rl.bench.arms import LONGEST, TAILS
from rl.bench.cell import Outcome

SPEEDUP = 1.7
WAIT = 0.05
FAST_GENERATOR = 1.2
FAILING = 0.95
BOUNDED = ("async-1", "async-2", "async-4", "async-8")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One required result: what, whether it holds, and the measurement in words."""

    what: str
    holds: bool
    measured: str


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Those that can be read from these outcomes."""
    waits = [_waits(outcomes, tail) for tail in TAILS]
    found = [_speedup(outcomes), *waits, _failing(outcomes), _bounds(outcomes), _books(outcomes)]
    return [verdict for verdict in found if verdict is not None]


def _speedup(outcomes: Sequence[Outcome]) -> Verdict | None:
    """By tokens: a step's time goes with those it trains on, which differ from run to run."""
    one = [each for each in outcomes if each.arm == "async-1" and each.world == (1.0, LONGEST, "warm")]
    if not one or not one[0].speedup_tokens:
        return None
    what = f"async-1 at equal rates, {LONGEST}: at least {SPEEDUP:g} times the speed of sync"
    measured = f"{one[0].speedup_tokens:.2f} times the tokens a second, {one[0].speedup:.2f} times the steps"
    return Verdict(what, one[0].speedup_tokens >= SPEEDUP, measured)


def _waits(outcomes: Sequence[Outcome], tail: str) -> Verdict | None:
    """The smallest bound with which the trainer hardly waits, whatever faster rate the generator has."""
    fast = [
        each
        for each in outcomes
        if each.tail == tail and each.sandboxes == "warm" and each.rate >= FAST_GENERATOR
    ]
    worst = {
        arm: max(each.wait_ratio for each in fast if each.arm == arm)
        for arm in BOUNDED
        if any(each.arm == arm for each in fast)
    }
    if not worst:
        return None
    enough = [arm for arm in worst if worst[arm] <= WAIT]
    measured = ", ".join(f"{arm} {ratio:.1%}" for arm, ratio in worst.items())
    least = f"; {enough[0]} is enough" if enough else ""
    what = f"generator at least {FAST_GENERATOR:g} times as fast, {tail}: wait ratio at most {WAIT:.0%}"
    return Verdict(what, bool(enough), f"at the worst rate {measured}{least}")


def _failing(outcomes: Sequence[Outcome]) -> Verdict | None:
    """Of the bounded arms together: each alone is noisier than what is asked."""
    bounded = [each for each in outcomes if each.arm in BOUNDED]
    speeds = {
        boxes: [each.tokens_per_second for each in bounded if each.sandboxes == boxes]
        for boxes in ("5 s", "5 s, 2% failing")
    }
    if not all(speeds.values()):
        return None
    ratio = fmean(speeds["5 s, 2% failing"]) / fmean(speeds["5 s"])
    what = "sandboxes of 5 s of which 2% fail: throughput within 5% of the same without failures"
    return Verdict(what, ratio >= FAILING, f"{ratio - 1:+.1%}")


def _bounds(outcomes: Sequence[Outcome]) -> Verdict:
    worst = [f"{each.arm} {each.staleness_max:g}" for each in outcomes if each.staleness_max > each.bound]
    return Verdict("no trained token is older than its arm's bound", not worst, ", ".join(worst) or "none is")


def _books(outcomes: Sequence[Outcome]) -> Verdict:
    open_ones = sum(not each.ledger_closed for each in outcomes)
    return Verdict(
        "all books close", not open_ones, f"{len(outcomes) - open_ones} of {len(outcomes)} cells close"
    )
