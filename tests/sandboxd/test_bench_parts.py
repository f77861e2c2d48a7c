"""The parts of the bench that measure nothing: plans, phases, objectives, verdicts, schema and page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd import stopwatch
from sandboxd.bench import charts, page, phases, plan, schema, slo, telemetry
from sandboxd.bench.chaos import SCORED, Course
from sandboxd.bench.client_limit import Shares
from sandboxd.bench.comparing import Run, read
from sandboxd.bench.plan import Plan, Visit
from sandboxd.bench.readings import thinned
from sandboxd.bench.report import busy_before
from sandboxd.bench.result import Result, curve, quantiles
from sandboxd.bench.session import Target
from sandboxd.bench.sweep import parse_targets
from sandboxd.clock import ManualClock
from sandboxd.config import ConfigError
from sandboxd.errors import Phase, SandboxLost, StartFailed

DOCS = Path(__file__).parents[2] / "docs"


def measured(*, ready: float = 0.5, name: str = "fake", count: int = 4) -> Result:
    result = Result("burst", name, count, alive=count)
    visits = [Visit(0.0, 0.0, ready - 0.1, ready, age=ready, parts={"create": 0.2}) for _ in range(count)]
    result.samples = {"ready": [ready] * count}
    result.wall = ready
    result.more = {"success_rate": 1.0, "retries": 0, "phases": phases.summary(visits)}
    return result


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_each_moment_and_caller_is_one_clients(moments: int, callers: int, clients: int) -> None:
    due = tuple(float(number) for number in range(moments))
    whole = Plan("unix:/x", "python", "me", due=due, callers=callers, hold=None)
    shares = whole.shares(clients)
    assert len(shares) == clients
    assert sorted(moment for share in shares for moment in share.due) == list(due)
    assert sum(share.callers for share in shares) == callers
    assert Plan.from_line(shares[0].to_line()) == shares[0]


def test_arrivals_come_at_their_rate() -> None:
    moments = plan.poisson(50.0, 100.0, seed=3)
    assert moments == plan.poisson(50.0, 100.0, seed=3) != plan.poisson(50.0, 100.0, seed=4)
    assert list(moments) == sorted(moments)
    assert 0 < moments[0] < moments[-1] < 100
    # Five times the deviation of such a count.
    assert abs(len(moments) - 5000) < 5 * 5000**0.5


@pytest.mark.parametrize(("first", "last"), [(0.0, 20.0), (5.0, 15.0), (10.0, 10.0), (20.0, 0.0)])
def test_a_ramp_comes_evenly_faster(first: float, last: float) -> None:
    moments = plan.ramp(first, last, 10.0)
    assert len(moments) == 100
    assert list(moments) == sorted(moments)
    assert 0 < moments[0] < moments[-1] <= 10.0 + 1e-6
    early = sum(moment < 5.0 for moment in moments)
    assert abs(early - (first * 5 + (last - first) * 1.25)) <= 1


def test_phases_add_up_to_the_whole() -> None:
    cold = Visit(0.0, 0.1, 1.0, 1.2, age=0.7, parts={"retry": 0.1, "create": 0.2, "ready": 0.3})
    found = phases.of(cold)
    assert sum(found.values()) == pytest.approx(1.2)
    # The start was decided 0.7 s before the lease and took 0.6.
    assert found["queue"] == pytest.approx(0.4)
    assert (found["retry"], found["create"], found["ready"], found["exec"]) == pytest.approx(
        (0.1, 0.2, 0.3, 0.2)
    )


def test_what_was_started_before_it_was_asked_for_cost_nothing() -> None:
    warm = Visit(5.0, 5.0, 5.01, 5.02, age=100.0, parts={"create": 0.2, "ready": 0.3})
    found = phases.of(warm)
    assert found["queue"] == pytest.approx(0.01)
    assert found["create"] == found["ready"] == 0
    half = Visit(5.0, 5.0, 5.2, 5.3, age=0.5, parts={"create": 0.2, "ready": 0.3})
    assert phases.of(half)["ready"] == pytest.approx(0.2)
    assert phases.of(half)["queue"] == pytest.approx(0.0)
    assert phases.of(Visit(0.0, 0.0, failure="QUEUE_FULL")) == {}
    assert phases.summary([]) is None


@given(*[st.floats(0, 10)] * 6)
def test_no_phase_is_negative(
    wait: float, age: float, retry: float, create: float, ready: float, run: float
) -> None:
    parts = {"retry": retry, "create": create, "ready": ready}
    found = phases.of(Visit(1.0, 1.0, 1.0 + wait, 1.0 + wait + run, age=age, parts=parts))
    assert min(found.values()) >= -1e-9
    assert sum(found.values()) == pytest.approx(wait + run, abs=1e-9)


def test_a_start_is_timed_by_phase() -> None:
    clock = ManualClock()
    stopwatch.enter(Phase.CREATE)  # nothing is timed: nothing happens
    with stopwatch.timed(clock.now) as watch:
        for _ in range(2):
            stopwatch.attempt()
            stopwatch.enter(Phase.PULL)
            clock.advance(1.0)
            stopwatch.enter(Phase.CREATE)
            clock.advance(2.0)
        stopwatch.enter(Phase.READY)
        clock.advance(0.5)
        stopwatch.enter(Phase.CREATE)
        clock.advance(0.25)
        found = watch.read()
    assert (found.attempts, found.retry) == (2, 3.0)
    assert (found.pull, found.create, found.ready, found.start) == (1.0, 2.25, 0.5, 0.0)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("p99_ready<2s", True),
        ("p99_ready < 600ms , failed=0", True),
        ("p50_ready>=500000us", True),
        ("p99_ready<0.5s", False),
        ("max_phase_create<=200ms", True),
        ("success>=99%,failed<1%", True),
        ("rate>7.9,alive=4,retries<1,wall<1s", True),
        # Not measured here, so not kept.
        ("p99_release<10s", False),
        ("leaked=0", False),
    ],
)
def test_an_objective_is_kept_or_not(text: str, met: bool) -> None:
    result = measured()
    missed = slo.judge(slo.parse(text), result)
    assert bool(missed) is not met
    told = result.record().slo
    assert told is not None
    assert all(term.met for term in told) is met


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no term of an SLO"),
        ("p99_ready", "'p99_ready' is no term"),
        ("p99_ready<2s,", "'' is no term"),
        ("p99_ready<fast", "'p99_ready<fast' is no term"),
        ("p99_ready<2", "a time needs a unit, one of us, ms, s"),
        ("p99_ready<2%", "a time needs a unit"),
        ("p98_ready<2s", "'p98_ready' is not measured: name failed"),
        ("p99_redy<2s", "'p99_redy' is not measured"),
        ("failed<2s", "failed is a number or has %, not s"),
        ("rate>2%", "rate is a number without a unit"),
        ("p99_ready==2s", "is no term"),
    ],
)
def test_an_objective_with_a_fault_is_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        slo.parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_objective_of_a_sweep_names_the_burst_that_missed_it() -> None:
    result = Result("sweep", "fake", 12)
    result.steps = [measured(ready=0.5, count=4), measured(ready=5.0, count=8)]
    assert slo.judge(slo.parse("p99_ready<2s"), result) == [
        "p99_ready<2s is missed: 5 s (burst of 8 on fake)"
    ]


@pytest.mark.parametrize(
    ("clients", "daemon", "limited", "words"),
    [
        ([0.95], 0.6, True, "had 95% of a processor, the daemon 60%; use --clients 2"),
        ([0.95], None, True, "the daemon's share is not known; use --clients 2"),
        ([0.2, 0.6], 0.99, False, "the client was not the limit"),
        ([0.2, 0.9], 0.99, False, "the host was full, of clients more than of the daemon"),
        ([0.1], 0.9, False, "the client was not the limit"),
    ],
)
def test_who_was_the_limit(clients: list[float], daemon: float | None, limited: bool, words: str) -> None:
    shares = Shares(clients=clients, daemon=daemon)
    assert shares.limited is limited
    assert words in shares.verdict(cpus=2)


def test_quantiles_and_curves_agree() -> None:
    values = [float(number) for number in range(1, 101)]
    assert quantiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    found = dict(curve(values))
    assert (found[0.0], found[100.0]) == (1.0, 100.0)
    assert quantiles([]) is None
    assert thinned(list(range(10_000)), 100)[::99] == [0, 9999]


def test_targets_of_a_sweep() -> None:
    base = Target(faults=("die 0.1",))
    found = parse_targets("namespace, docker/runsc,docker-sdk", "python", base)
    assert [target.name for target in found] == ["namespace", "docker/runsc", "docker-sdk"]
    assert [target.image for target in found] == [None, "python", "python"]
    assert found[1].faults == ("die 0.1",)
    for text, words in [
        ("namespace/runsc", "only containers have a runtime"),
        ("docker", "needs --image NAME"),
        ("podman", "begins with none of namespace, docker"),
        ("fake,", "'' in the targets"),
    ]:
        with pytest.raises(ValueError, match=words):
            parse_targets(text, None, base)


def test_the_schema_is_up_to_date_and_its_keys_explained() -> None:
    written = json.loads((DOCS / "bench.schema.json").read_text())
    assert written == schema.json_schema(), "python -m sandboxd.bench.schema > docs/bench.schema.json"
    text = (DOCS / "benchmarks.md").read_text()
    unexplained = [name for name in schema.Record.model_fields if f"`{name}`" not in text]
    assert unexplained == []


def test_earlier_files_are_read_and_later_ones_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    # As it was before there were versions.
    old = {"shape": "burst", "backend": "fake", "count": 1, "failed": 0, "wall_s": 1.0, "ready_s": None}
    file.write_text(json.dumps(old))
    assert read(file).record.version == 1
    for content, words in [
        (json.dumps({**old, "version": 2}), "is no measurement of version 1 or earlier: version: "),
        (json.dumps({**old, "count": "many"}), "count: "),
        (json.dumps({**old, "speed": 1}), "speed: "),
        ("[]", "the file: "),
        ("{", "is no JSON (line 1)"),
    ]:
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        read(file)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")


class _Seen(HTMLParser):
    """Notes tags that are left open, and everything that would be loaded from elsewhere."""

    VOID = ("meta", "line", "rect", "circle", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def looked_at(text: str) -> _Seen:
    seen = _Seen()
    seen.feed(text)
    assert seen.open == seen.loaded == []
    assert not re.search(r"https?:|url\(|@import|<script", text)
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", text.lower())
    return seen


def test_the_page_stands_alone() -> None:
    sweep = Result("sweep", "fake, <b>other</b>", 24)
    sweep.steps = [
        measured(ready=count / 10, name=name, count=count)
        for name in ("fake", "<b>other</b>")
        for count in (4, 8)
    ]
    sweep.steps[0].failures = ["<script>alert(1)</script>"]
    text = page.measurement(sweep.record())
    seen = looked_at(text)
    assert {"svg", "polyline", "circle", "rect", "table"} <= seen.tags
    assert "&lt;script&gt;alert(1)" in text
    # A file that was written is drawn as what wrote it.
    again = schema.Record.model_validate_json(sweep.record().model_dump_json())
    looked_at(page.comparison([Run("before", again), Run("after", again)]))


def test_a_page_of_nothing_measured_says_so() -> None:
    empty = Result("burst", "fake", 3, failures=["START_FAILED: no"] * 3, alive=0)
    assert "nothing was measured" in page.measurement(empty.record())
    looked_at(page.measurement(empty.record()))


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_an_axis_holds_its_values_between_its_ends(values: list[float]) -> None:
    for logarithmic in (False, True):
        axis = charts.Axis.over("s", values, may_be_logarithmic=logarithmic)
        assert all(0 <= axis.part(value) <= 1 for value in values)
        ticks = axis.ticks()
        assert ticks == sorted(set(ticks))
        assert 1 <= len(ticks) <= 30


def ended(scored: int, lost: int, failed: int) -> Course:
    course = Course()
    ends = [SCORED] * scored + [SandboxLost.reason] * lost
    ends += [course.failed(StartFailed(f"p-{n:012x} cannot be made, after 0.{n} s")) for n in range(failed)]
    for number, outcome in enumerate(ends):
        course.ended(number, outcome)
    return course


@pytest.mark.parametrize(
    ("scored", "lost", "failed"), [(566, 385, 9), (960, 0, 0), (96, 864, 0), (75, 0, 25)]
)
def test_a_chaos_that_says_something(scored: int, lost: int, failed: int) -> None:
    assert ended(scored, lost, failed).verdict(scored + lost + failed) == []


@pytest.mark.parametrize(
    ("scored", "lost", "failed", "said"),
    [
        (0, 82, 878, "0 of 960 rollouts were scored, 878 kept .*: at least 75% .*; most often 878 "),
        (74, 0, 26, "; most often 26 START_FAILED: p-000000000000 cannot be made, after 0.0 s"),
        (95, 865, 0, "95 of 960 rollouts were scored, 95 kept .* 10% of all are to be$"),
    ],
)
def test_a_chaos_in_which_hardly_any_rollout_is_scored_has_failed(
    scored: int, lost: int, failed: int, said: str
) -> None:
    (verdict,) = ended(scored, lost, failed).verdict(scored + lost + failed)
    assert re.search(said, verdict)


def test_work_of_others_is_said() -> None:
    assert busy_before(0.1) == ""
    assert "busy to 80% before the load" in busy_before(0.8)


def test_the_share_of_telemetry_says_how_sure_it_is() -> None:
    told = telemetry.compared(off=[1.0, 2.0, 1.0], on=[1.02, 2.06, 1.04], commands=1000)
    assert told["share"] == pytest.approx(0.03)
    assert told["off_us"] == pytest.approx(4000 / 3)
    assert told["more_us"] == pytest.approx(40)
    # Student's t of two degrees of freedom is 4.303, the standard error 0.01 / sqrt(3).
    assert told["share_low"] == pytest.approx(0.03 - 0.02484, abs=0.001)
    assert told["share_high"] == pytest.approx(0.03 + 0.02484, abs=0.001)


def test_the_throughput_with_telemetry_is_told_too() -> None:
    told = telemetry.slower(off=[1.0, 2.0], on=[1.25, 2.5], commands=1000)
    assert told["off_per_s"] == pytest.approx(1000 / 1.5)
    assert told["on_per_s"] == pytest.approx(1000 / 1.875)
    assert told["slower"] == told["slower_low"] == told["slower_high"] == pytest.approx(0.2)


def test_one_pair_of_daemons_claims_no_interval() -> None:
    told = telemetry.compared(off=[1.0], on=[1.03], commands=1000)
    assert told["share"] == pytest.approx(0.03)
    assert "share_low" not in told
