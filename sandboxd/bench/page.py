"""Measurements as one page of HTML that needs nothing else: no script, no font, nothing from a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from sandboxd.bench import charts
from sandboxd.bench.charts import Axis, Series
from sandboxd.bench.comparing import Run, columns
from sandboxd.bench.phases import PHASES
from sandboxd.bench.report import PHASE_MEANING, busy_before
from sandboxd.bench.schema import Reading, Record
from sandboxd.bench.style import STYLE

Column = tuple[str, dict[str, Record]]
# With the number of its column: each has one colour in all plots.
Shown = tuple[int, str, Record]


def measurement(record: Record) -> str:
    """The page of one run; a sweep's has its targets, another's its baseline beside it."""
    runs = [Run(record.backend, record)]
    if record.baseline is not None:
        runs.append(Run(record.baseline.backend, record.baseline))
    title = f"sandboxd bench {record.shape}: {record.backend}"
    return _page(title, [(records_name(name, records), records) for name, _, records in columns(runs)])


def comparison(runs: Sequence[Run]) -> str:
    """The page of several runs beside each other."""
    compared = columns(runs)
    names = " and ".join(name for name, _, _ in compared) if len(compared) < 4 else f"{len(compared)} runs"
    return _page(f"sandboxd bench: {names}", [(name, records) for name, _, records in compared])


def records_name(name: str, records: dict[str, Record]) -> str:
    """A sweep's target, without the name of the run before it."""
    backends = {record.backend for record in records.values()}
    return backends.pop() if len(backends) == 1 else name


def _page(title: str, compared: list[Column]) -> str:
    keys = list(dict.fromkeys(key for _, records in compared for key in records))
    sections = [_overview(compared, keys), _by_count(compared)]
    for key in keys:
        there = [
            (colour, name, records[key]) for colour, (name, records) in enumerate(compared) if key in records
        ]
        sections.append(f"<section><h2>{escape(key)}</h2>{_plots(there)}{_details(there)}</section>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{_host(compared)}{''.join(sections)}</main></body></html>\n"
    )


def _host(compared: list[Column]) -> str:
    hosts = [record.host for _, records in compared for record in records.values() if record.host]
    if not hosts:
        return ""
    host = hosts[0]
    memory = float(host.get("memory_bytes", 0)) / 1e9
    words = f"{host.get('cpus')} processors ({host.get('cpu')}), {memory:.0f} GB, Linux {host.get('kernel')}"
    return f'<p class="host">{escape(words)}</p>'


def _overview(compared: list[Column], keys: list[str]) -> str:
    head = (
        "",
        "",
        "ready p50",
        "p90",
        "p99",
        "max",
        "a second",
        "served",
        "failed",
        "retries",
        "alive",
        "left",
    )
    rows = []
    for key in keys:
        for name, records in compared:
            if (one := records.get(key)) is not None:
                rows.append([key, name, *_times(one), _number(one.rate_per_s), *_counts(one)])
    return f"<section><h2>Overview</h2>{_table(head, rows)}</section>"


def _times(record: Record) -> list[str]:
    ready = record.ready_s
    return (
        ["-"] * 4
        if ready is None
        else [_seconds(ready.p50), _seconds(ready.p90), _seconds(ready.p99), _seconds(ready.max)]
    )


def _counts(record: Record) -> list[str]:
    success = "-" if record.success_rate is None else f"{record.success_rate:.1%}"
    left = "-" if record.leaked is None else str(sum(record.leaked.values()))
    return [success, str(record.failed), _number(record.retries), _number(record.alive_after_hold), left]


def _by_count(compared: list[Column]) -> str:
    """How bursts fare as they grow; nothing where there is one size only."""
    ready: list[Series] = []
    rates: list[Series] = []
    for colour, (name, records) in enumerate(compared):
        bursts = sorted((one for one in records.values() if one.shape == "burst"), key=lambda one: one.count)
        if len(bursts) < 2:
            continue
        for point, dashed in (("p99", False), ("p50", True)):
            points = [(float(one.count), float(getattr(one.ready_s, point))) for one in bursts if one.ready_s]
            ready.append(Series(f"{name} {point}", points, colour, dashed))
        rates.append(Series(name, [(float(one.count), one.rate_per_s or 0.0) for one in bursts], colour))
    if not ready:
        return ""
    figures = (
        _figure("Seconds until ready", _lines(ready, "asking at once", "seconds", logarithmic=True)),
        _figure("Ready sandboxes in a second", _lines(rates, "asking at once", "a second")),
    )
    return f'<section><h2>As more ask at once</h2><div class="plots">{"".join(figures)}</div></section>'


def _plots(there: list[Shown]) -> str:
    figures = [_figure("Distribution: percent that took so long at most", _distribution(there))]
    over_time = [Series(name, _steps(record), colour) for colour, name, record in there]
    if any(series.points for series in over_time):
        figures.append(_figure("Ready over time", _lines(over_time, "seconds", "ready")))
    phases = [
        (name, {PHASE_MEANING[phase]: getattr(record.phases, phase).mean for phase in PHASES})
        for _, name, record in there
        if record.phases is not None
    ]
    if phases:
        axis = Axis.over("seconds, mean", [sum(parts.values()) for _, parts in phases])
        figures.append(_figure("Where the time went", charts.stacked(phases, axis)))
    return f'<div class="plots">{"".join(figures)}</div>'


def _steps(record: Record) -> list[tuple[float, float]]:
    points = [(float(at), float(count)) for at, count in record.ready_over_time or []]
    return [(0.0, 0.0), *points] if points else []


def _distribution(there: list[Shown]) -> str:
    """Of several runs of what they have in common; of one all that it has timed."""
    series = []
    for colour, name, record in there:
        curves = record.curves if len(there) == 1 else dict(list(record.curves.items())[:1])
        for offset, (timed, curve) in enumerate(curves.items()):
            points = [(seconds, percent) for percent, seconds in curve]
            series.append(Series(timed if len(there) == 1 else f"{name}: {timed}", points, colour + offset))
    across = Axis.over("seconds", (x for one in series for x, _ in one.points), may_be_logarithmic=True)
    return charts.lines(series, across, Axis("percent", 0.0, 100.0))


def _details(there: list[Shown]) -> str:
    alone = " open" if len(there) == 1 else ""
    return "".join(
        f"<details{alone}><summary>{escape(name)}: pool, host, failures</summary>{_detail(record)}</details>"
        for _, name, record in there
    )


def _detail(record: Record) -> str:
    parts = []
    if record.slo:
        rows = [["met" if term.met else "missed", term.term, _number(term.measured)] for term in record.slo]
        parts.append(_table(("SLO", "term", "measured"), rows))
    if record.clients is not None:
        parts.append(f"<p>{escape(record.clients.verdict)}.</p>")
    if record.arrivals is not None:
        windows = record.arrivals.windows
        offered = Series("offered", [(one.to_s, one.offered_per_s) for one in windows], 0)
        served = Series("served", [(one.to_s, one.served_per_s) for one in windows], 1)
        parts.append(_figure("Callers a second", _lines([offered, served], "seconds", "a second")))
    if record.readings is not None:
        if record.readings.before and (warning := busy_before(record.readings.before.host_cpu)):
            parts.append(f"<p>{escape(warning)}.</p>")
        parts += [_readings_plots(record.readings.timeline), _readings_table(record)]
    if record.failures:
        parts.append(f"<ul>{''.join(f'<li>{escape(failure)}</li>' for failure in record.failures)}</ul>")
    return "".join(parts) or '<p class="none">nothing more was measured</p>'


def _readings_plots(timeline: Sequence[Reading]) -> str:
    def series(name: str, value: Callable[[Reading], float | None], colour: int) -> Series:
        points = [(one.at, found) for one in timeline if (found := value(one)) is not None]
        return Series(name, points, colour)

    pool = [
        series("starting", lambda one: one.starting, 0),
        series("warm", lambda one: one.warm, 1),
        series("leased", lambda one: one.active, 2),
        series("waiting", lambda one: one.waiting, 3),
    ]
    processor = [
        series("host, of all processors", lambda one: 100 * one.host_cpu, 0),
        series("daemon, of one", lambda one: None if one.daemon_cpu is None else 100 * one.daemon_cpu, 1),
    ]
    return (
        f'<div class="plots">{_figure("The pool over time", _lines(pool, "seconds", "sandboxes"))}'
        f"{_figure('Processor time', _lines(processor, 'seconds', 'percent'))}</div>"
    )


def _readings_table(record: Record) -> str:
    head = ("", "host busy", "memory left", "pids", "fds", "daemon", "its memory", "its fds")
    rows = []
    readings = record.readings
    for name in ("before", "peak", "after"):
        one: Reading | None = getattr(readings, name)
        if one is not None:
            memory = None if one.daemon_rss_bytes is None else one.daemon_rss_bytes / 1e6
            host = [f"{one.host_cpu:.0%}", f"{one.memory_available_bytes / 1e9:.2f} GB"]
            daemon = ["-" if one.daemon_cpu is None else f"{one.daemon_cpu:.0%}", f"{_number(memory)} MB"]
            rows.append(
                [name, *host, str(one.host_pids), str(one.host_fds), *daemon, _number(one.daemon_fds)]
            )
    return _table(head, rows)


def _lines(series: list[Series], across: str, up: str, *, logarithmic: bool = False) -> str:
    x = Axis.over(across, (x for one in series for x, _ in one.points))
    y = Axis.over(up, (y for one in series for _, y in one.points), may_be_logarithmic=logarithmic)
    return charts.lines(series, x, y)


def _figure(caption: str, inner: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{inner}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else charts.short(value)
