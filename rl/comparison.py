"""Several runs side by side on one page: figures, curves, and the settings in which they differ."""

from __future__ import annotations

import html
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.charts import Chart, line_chart
from rl.errors import ConfigError
from rl.report import PAGE, key_figures

CURVES = {
    "solve_rate/all": ("Solve rate while training", "solve rate"),
    "heldout/overall": ("Held-out solve rate", "solve rate"),
    "perf/wait_time_ratio": ("Wait ratio", "share of time"),
    "perf/generator_idle_ratio": ("Generator idle", "share of time"),
    "off_policy/mean": ("Staleness", "versions"),
    "rollout/generated_tok_s": ("Generated", "tokens/s"),
    "time/step": ("Time of a step", "seconds"),
    "buffer/depth": ("Groups that waited", "groups"),
    "rollout/inflight_max": ("Most episodes under way", "episodes"),
    "queue/length_bias": ("Length bias", "share"),
    "mismatch_kl": ("Sampler and trainer apart", "KL"),
    "loop/lag_p99_s": ("Event loop late, p99", "seconds"),
}

ASKED = ("model", "endpoint", "families", "samples", "temperature", "top_p")
"""What of `eval.json` says how it was measured."""


@dataclass(frozen=True, slots=True)
class Run:
    """What lies in a run's directory: of `train` a summary and rows, of `eval` an evaluation."""

    name: str
    summary: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    rows: Sequence[Mapping[str, float]]
    settings: Mapping[str, str]


def write_comparison(directories: Sequence[Path]) -> Path:
    """Writes `comparison.html` in the first run's directory. ConfigError where one holds no results."""
    runs = [read_run(directory, number, directories) for number, directory in enumerate(directories)]
    names = [run.name for run in runs]
    body = "".join(
        [
            "<h1>Runs side by side</h1>",
            _section("Figures", names, _merged([_figures(run) for run in runs])),
            _section("pass@k", names, _merged([_passes(run) for run in runs])),
            *_curves(runs),
            _section("Settings that differ", names, _differing([run.settings for run in runs])),
        ]
    )
    target = directories[0] / "comparison.html"
    target.write_text(PAGE.format(title=html.escape(f"Runs {', '.join(names)}"), body=body))
    return target


def read_run(directory: Path, number: int, all_of_them: Sequence[Path]) -> Run:
    """Reads one run; runs whose directories are called the same are numbered."""
    summary, evaluation = (_json(directory / name) for name in ("summary.json", "eval.json"))
    if not summary and not evaluation:
        raise ConfigError(
            f"{directory} holds no summary.json or eval.json; give directories of finished runs"
        )
    same = sum(other.resolve().name == directory.resolve().name for other in all_of_them) > 1
    metrics, config = directory / "metrics.jsonl", directory / "config.toml"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return Run(
        name=directory.resolve().name + (f" ({number + 1})" if same else ""),
        summary=summary,
        evaluation=evaluation,
        rows=[json.loads(line) for line in lines],
        settings=_settings(tomllib.loads(config.read_text()) if config.exists() else {}, evaluation),
    )


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _settings(file: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, str]:
    asked = {key: evaluation[key] for key in ASKED if key in evaluation}
    return dict(_flat(file)) | dict(_flat(asked, "eval."))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _figures(run: Run) -> dict[str, str]:
    return key_figures(run.summary) if run.summary else {}


def _passes(run: Run) -> dict[str, str]:
    return {
        f"{group}, pass@{k}": f"{each['value']:.1%} ({each['low']:.1%} to {each['high']:.1%})"
        for group, estimates in run.evaluation.get("pass_at_k", {}).items()
        for k, each in estimates.items()
    }


def _merged(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Each name of any column, in order → its value in every column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "-") for column in columns] for name in names}


def _differing(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: values for name, values in _merged(columns).items() if len(set(values)) > 1}


def _section(title: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table with a column a run; nothing where it would be empty."""
    if not rows:
        return ""
    head = _cells("th", ("", *names))
    lines = "".join(f"<tr>{_cells('td', (name, *values))}</tr>" for name, values in rows.items())
    return f"<h2>{title}</h2><div class='wide'><table><tr>{head}</tr>{lines}</table></div>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _curves(runs: Sequence[Run]) -> Iterable[str]:
    for key, (title, unit) in CURVES.items():
        lines = {run.name: [(row["step"], row[key]) for row in run.rows if key in row] for run in runs}
        drawn = {name: points for name, points in lines.items() if points}
        if drawn:
            yield f"<h2>{title}</h2>{line_chart(Chart(title, unit, drawn))}"
