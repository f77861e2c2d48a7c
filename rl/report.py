"""A run's `report.html`: one page with its pictures and tables, that needs nothing but itself."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl.charts import Chart, line_chart, paired_bars

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #ffffff; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d8d8d8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #141414; --ink: #ececec; --soft: #a8a8a8; --line: #3a3a3a; }}
}}
body {{ margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ margin-bottom: 0; }}
h2 {{ margin-top: 2.5rem; }}
svg {{ width: 100%; height: auto; }}
.soft {{ color: var(--soft); }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; }}
.figures div {{ border-top: 2px solid var(--line); padding-top: .3rem; }}
.figures b {{ display: block; font-size: 1.6rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left; }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums; }}
pre {{ overflow-x: auto; border: 1px solid var(--line); padding: .8rem; }}
</style>
<main>
{body}
</main>
</html>
"""

ENDINGS = {"groups/": "Groups", "stop/": "Episodes", "error/": "Episodes lost to infrastructure"}
"""Counts in the rows of steps, by what their names begin with."""


def write_report(run: Path) -> Path:
    """Reads `summary.json`, `metrics.jsonl` and `config.toml` of a run and writes `report.html` beside them.

    Raises OSError or ValueError when one of them is missing or broken.
    """
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = (run / "config.toml").read_text()
    title = f"Run {run.name}"
    body = "\n".join(
        [
            _head(title, summary),
            _held_out(summary),
            *_pictures(rows),
            _changes(summary),
            _endings(rows),
            _books(summary),
            _config(config),
        ]
    )
    target = run / "report.html"
    target.write_text(PAGE.format(title=html.escape(title), body=body))
    return target


def key_figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """What a run came to, as a person reads it: name → value."""
    before, after = _benchmark(summary, "before"), _benchmark(summary, "after")
    return {
        "held-out solve rate before": _number(before),
        "held-out solve rate after": _number(after),
        "steps": str(summary["steps"]),
        "wall clock": f"{summary['wall_s'] / 60:.1f} min",
        "trainer waited": _percent(summary["wait_ratio"]),
        "generator idle": _percent(summary["generator_idle_ratio"]),
        "trained tokens": f"{summary['trained_tokens']:,}",
        "generated tokens": f"{summary['generated_tokens']:,}",
        "trainer's tokens shared": _percent(
            1.0 - _share(summary, "train_tokens_computed", "train_tokens_unshared")
        ),
        "prompt tokens cached": _percent(_share(summary, "prompt_tokens_cached", "prompt_tokens")),
        **_health(summary),
    }


def _health(summary: Mapping[str, Any]) -> dict[str, str]:
    """What says whether the data and the loop were sound; runs of earlier versions do not hold it."""
    lengths, worst = summary.get("length_bias"), summary.get("worst")
    found = {}
    if lengths is not None:
        found["length bias"] = f"{lengths['bias']:+.1%}"
        found["given up late"] = _percent(lengths["late_share"])
    if worst is not None:
        found["event loop late, p99"] = f"{1e3 * worst['loop_lag_p99_s']:.0f} ms"
        found["sampler and trainer apart (KL)"] = f"{worst['mismatch_kl']:.2g}"
        found["cache held, at most"] = _percent(worst["kv_cache_usage"])
        found["preemptions"] = f"{worst['preemptions']:.0f}"
    return found


def _head(title: str, summary: Mapping[str, Any]) -> str:
    figures = key_figures(summary)
    cells = "".join(f"<div><b>{value}</b>{html.escape(name)}</div>" for name, value in figures.items())
    note = "The benchmark kinds count in equal shares; held-out problems are never trained on."
    head = f'<h1>{html.escape(title)}</h1><p class="soft">seed {summary["seed"]}. {note}</p>'
    return f'{head}<div class="figures">{cells}</div>'


def _share(summary: Mapping[str, Any], part: str, whole: str) -> float:
    shared = summary["shared"]
    return float(shared[part] / max(shared[whole], 1.0))


def _benchmark(summary: Mapping[str, Any], when: str) -> float | None:
    evaluation = summary["heldout"].get(when) or {}
    value = (evaluation.get("benchmark") or {}).get("overall")
    return evaluation.get("overall") if value is None else value


def _held_out(summary: Mapping[str, Any]) -> str:
    before, after = (summary["heldout"].get(when) or {} for when in ("before", "after"))
    parts = ["<h2>Held-out solve rate</h2>"]
    kinds = [(evaluation.get("benchmark") or {}).get("kinds") or {} for evaluation in (before, after)]
    if any(kinds):
        parts.append(paired_bars("Held-out solve rate by benchmark kind", *kinds))
    families = [evaluation.get("families") or {} for evaluation in (before, after)]
    if any(families):
        parts.append("<h3>All families and levels, the fixed mix</h3>")
        parts.append(paired_bars("Held-out solve rate by family", *families))
    return "".join(parts)


def _pictures(rows: list[dict[str, float]]) -> Iterable[str]:
    """One section a subject; a picture without data is left out."""
    sections = (
        (
            "Solve rate while training",
            "Of the tasks drawn, which grow harder as levels open.",
            _solve_rate(rows),
        ),
        ("Levels open", "How far the curriculum has opened each family.", _levels(rows)),
        (
            "Problems at rest",
            "Of each fixed set those left out for a while, being too hard or solved.",
            _resting(rows),
        ),
        ("Wait ratio", "Share of the step in which the trainer had nothing to train.", _wait(rows)),
        (
            "Queue",
            "Finished groups that waited for the trainer, episodes under way, and how many may be.",
            _queue(rows),
        ),
        (
            "Staleness",
            "Weight versions between sampling and training, queue time included.",
            _staleness(rows),
        ),
        (
            "Given up late",
            "Share of attempts that took too long, and how much shorter the trained ones are for it.",
            _late(rows),
        ),
        ("Throughput", "Tokens a second.", _throughput(rows)),
        ("Rates of the stages", "Episodes that ended and sandboxes that started, each second.", _rates(rows)),
        (
            "Engine",
            "Share of the cache for keys and values that requests held, the most in each step.",
            _engine(rows),
        ),
        (
            "Sampler and trainer",
            "How far the trainer's probabilities of the sampled tokens are from the sampler's.",
            _mismatch(rows),
        ),
        ("Event loop", "How late it was, at the 99th percentile of each step.", _lag(rows)),
        ("Sandbox latency", "From asking for a sandbox to having one.", _latency(rows)),
        ("Where a step's time goes", "Seconds of each step.", _times(rows)),
    )
    for title, note, chart in sections:
        if chart.lines:
            yield f'<h2>{title}</h2><p class="soft">{note}</p>{line_chart(chart)}'


def _line(rows: list[dict[str, float]], key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    return [(row["step"], row[key] * scale) for row in rows if key in row]


def _lines(rows: list[dict[str, float]], names: Mapping[str, str], scale: float = 1.0) -> dict[str, Any]:
    found = {label: _line(rows, key, scale) for key, label in names.items()}
    return {label: points for label, points in found.items() if points}


def _with_prefix(rows: list[dict[str, float]], prefix: str) -> dict[str, str]:
    keys = sorted({key for row in rows for key in row if key.startswith(prefix)})
    return {key: key.removeprefix(prefix) for key in keys if "/" not in key.removeprefix(prefix)}


def _solve_rate(rows: list[dict[str, float]]) -> Chart:
    return Chart(
        "Solve rate per family", "solve rate", _lines(rows, _with_prefix(rows, "solve_rate/")), top=1.02
    )


def _levels(rows: list[dict[str, float]]) -> Chart:
    return Chart("Open levels per family", "levels", _lines(rows, _with_prefix(rows, "curriculum/open/")))


def _resting(rows: list[dict[str, float]]) -> Chart:
    prefix = "curriculum/resting/"
    keys = sorted({key for row in rows for key in row if key.startswith(prefix)})
    names = {key: " ".join(key.removeprefix(prefix).rsplit("/", 1)) for key in keys}
    return Chart("Problems of fixed sets at rest", "problems", _lines(rows, names))


def _wait(rows: list[dict[str, float]]) -> Chart:
    lines = _lines(
        rows, {"perf/wait_time_ratio": "trainer waits", "perf/generator_idle_ratio": "generator idle"}
    )
    return Chart("Wait ratio", "share of time", lines, top=1.02)


def _queue(rows: list[dict[str, float]]) -> Chart:
    names = {
        "buffer/depth": "groups ready",
        "rollout/inflight": "episodes under way",
        "rollout/inflight_max": "most under way in the step",
        "concurrency/max_inflight": "episodes allowed",
    }
    return Chart("Queue depth", "count", _lines(rows, names))


def _staleness(rows: list[dict[str, float]]) -> Chart:
    return Chart(
        "Staleness", "versions", _lines(rows, {"off_policy/mean": "mean", "off_policy/max": "maximum"})
    )


def _throughput(rows: list[dict[str, float]]) -> Chart:
    names = {"rollout/generated_tok_s": "generated", "perf/trained_tok_s": "trained, while training"}
    return Chart("Throughput", "tokens/s", _lines(rows, names))


def _late(rows: list[dict[str, float]]) -> Chart:
    names = {"queue/late_share": "late", "queue/length_bias": "length bias"}
    return Chart("Late attempts", "share", _lines(rows, names), bottom=None)


def _rates(rows: list[dict[str, float]]) -> Chart:
    names = {"rollout/episode_rate": "episodes", "sandbox/start_rate": "sandboxes"}
    return Chart("Rates", "a second", _lines(rows, names))


def _engine(rows: list[dict[str, float]]) -> Chart:
    return Chart("Cache use", "share", _lines(rows, {"inference/kv_cache_usage_max": "held"}), top=1.02)


def _mismatch(rows: list[dict[str, float]]) -> Chart:
    return Chart("Mismatch", "KL", _lines(rows, {"mismatch_kl": "mismatch"}))


def _lag(rows: list[dict[str, float]]) -> Chart:
    return Chart("Event loop", "milliseconds", _lines(rows, {"loop/lag_p99_s": "p99"}, 1e3))


def _latency(rows: list[dict[str, float]]) -> Chart:
    keys = sorted({key for row in rows for key in row if key.startswith("sandbox/") and key.endswith("_s")})
    names = {key: key.removeprefix("sandbox/").removesuffix("_s").replace("_", " ") for key in keys}
    return Chart("Sandbox latency", "milliseconds", _lines(rows, names, 1e3))


def _times(rows: list[dict[str, float]]) -> Chart:
    names = {
        "time/step": "whole step",
        "time/wait_for_batch": "waiting for a batch",
        "time/train": "training",
        "time/publish": "publishing weights",
    }
    return Chart("Time of each step", "seconds", _lines(rows, names))


def _changes(summary: Mapping[str, Any]) -> str:
    """When and why more or fewer episodes were allowed at once; nothing where they never were."""
    rows = [
        f"<tr><td>{change['at']:.0f} s</td><td>{change['before']} → {change['after']}</td>"
        f"<td>{html.escape(change['reason'])}</td></tr>"
        for change in summary.get("concurrency", [])
    ]
    if not rows:
        return ""
    head = (
        "<h2>Episodes at once</h2><p class='soft'>What the limit was changed for, since the last start.</p>"
    )
    return f"{head}<div class='wide'><table>{''.join(rows)}</table></div>"


def _endings(rows: list[dict[str, float]]) -> str:
    """How groups and episodes ended, and what infrastructure did to them; nothing where none has."""
    tables = []
    for prefix, title in ENDINGS.items():
        names = sorted({key for row in rows for key in row if key.startswith(prefix)})
        cells = "".join(
            f"<tr><td>{html.escape(name.removeprefix(prefix).replace('_', ' '))}</td>"
            f"<td>{sum(row.get(name, 0.0) for row in rows):,.0f}</td></tr>"
            for name in names
        )
        tables.append(f"<h3>{title}</h3><div class='wide'><table>{cells}</table></div>" if cells else "")
    return f"<h2>How they ended</h2>{''.join(tables)}" if any(tables) else ""


def _books(summary: Mapping[str, Any]) -> str:
    rule = (
        "Generated = trained + discarded + left over + evaluated, "
        "and inherited + acquired = released + expired + lost"
    )
    parts = [f'<h2>Books</h2><p class="soft">{rule}: checked at the end of the run.</p>']
    for name, column in summary["ledger"].items():
        cells = "".join(
            f"<tr><td>{html.escape(key)}</td><td>{value}</td></tr>" for key, value in _flat(column)
        )
        parts.append(f"<h3>{html.escape(name)}</h3><div class='wide'><table>{cells}</table></div>")
    staleness = summary["staleness"]
    parts.append(
        f"<p>Staleness of trained groups: mean {_number(staleness['mean'])}, maximum {staleness['max']}.</p>"
    )
    return "".join(parts)


def _flat(column: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in column.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}: {reason}", f"{count:,}") for reason, count in value.items())
        else:
            yield key.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)


def _config(text: str) -> str:
    return f"<h2>Configuration</h2><pre>{html.escape(text)}</pre>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
