"""The report is one page that needs nothing else; the progress display says what a person asks."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from rl.comparison import write_comparison
from rl.errors import ConfigError
from rl.progress import Progress
from rl.report import write_report
from sandboxd import PoolStats

KINDS = {"sums_2": 0.5, "letters": 0.0}


def evaluation(overall: float) -> dict[str, object]:
    return {
        "overall": overall,
        "families": {"sums": overall},
        "benchmark": {"overall": overall, "kinds": KINDS},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [
        {
            "step": step,
            "solve_rate/all": 0.1 * step,
            "solve_rate/sums": 0.1 * step,
            "solve_rate/<b>odd</b>": 0.2,
            "perf/wait_time_ratio": 0.4,
            "buffer/depth": 2,
            "off_policy/max": 1,
            "sandbox/acquire_p50_s": 0.002,
            "queue/late_share": 0.3,
            "queue/length_bias": -0.1,
            "loop/lag_p99_s": 0.004,
            "mismatch_kl": 0.0005,
            "groups/zero_advantage": 3.0,
            "stop/max_turns": 1000.0,
            "error/SANDBOX_LOST": 2.0,
        }
        for step in range(1, 6)
    ]
    summary = {
        "heldout": {"before": evaluation(0.11), "after": evaluation(0.83)},
        "seed": 3,
        "steps": 5,
        "wall_s": 90.0,
        "wait_ratio": 0.25,
        "generator_idle_ratio": None,
        "trained_tokens": 1234,
        "generated_tokens": 5678,
        "shared": {
            "train_tokens_unshared": 1000.0,
            "train_tokens_computed": 210.0,
            "prompt_tokens": 100.0,
            "prompt_tokens_cached": 87.0,
        },
        "staleness": {"mean": 0.5, "max": 1},
        "length_bias": {"bias": -0.126, "late_share": 0.31, "late_episodes": 4, "trained_tokens_mean": 90.0},
        "worst": {
            "loop_lag_p99_s": 0.0123,
            "loop_lag_max_s": 0.4,
            "mismatch_kl": 0.00071,
            "preemptions": 41.0,
            "kv_cache_usage": 0.93,
            "sandbox_wait_s": 1.5,
        },
        "ledger": {
            "episodes": {"generated": 9, "trained": 8, "discarded": {"unscored:SANDBOX_LOST": 1}},
            "sandboxes": {"acquired": 9, "released": 8, "expired": 0, "lost": 1},
        },
        "versions": {},
    }
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.toml").write_text('seed = 3 # <script>alert("x")</script>\n')
    return tmp_path


class Page(HTMLParser):
    """Collects what a browser would fetch, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_shows_the_numbers(run: Path) -> None:
    text = write_report(run).read_text()
    page = Page(text)
    assert page.fetched == []
    assert "url(http" not in text
    assert "@import" not in text
    assert page.tags.count("svg") >= 6
    assert len(page.ids) == len(set(page.ids))
    for shown in (
        "0.11",
        "0.83",
        "1,234",
        "25%",
        "79%",
        "87%",
        "-12.6%",
        "31%",
        "12 ms",
        "0.00071",
        "41",
        "Given up late",
        "Event loop",
        "zero advantage15",
        "max turns5,000",
        "SANDBOX LOST10",
        "unscored:SANDBOX_LOST",
        "Solve rate while training",
    ):
        assert shown in page.text
    assert "script" not in page.tags
    assert "prefers-color-scheme: dark" in text


def test_pictures_without_data_are_left_out(run: Path) -> None:
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "buffer/depth": 1}) + "\n")
    page = Page(write_report(run).read_text())
    assert "Queue" in page.text
    assert "Sandbox latency" not in page.text
    assert "Problems at rest" not in page.text


def test_problems_at_rest_are_shown_by_set(run: Path) -> None:
    sets = ("human_eval/0", "own/1")
    rows = [{"step": step} | {f"curriculum/resting/{each}": step for each in sets} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(run).read_text())
    assert "Problems at rest" in page.text
    assert "human_eval 0" in page.text
    assert "own 1" in page.text


def test_runs_are_put_side_by_side(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "config.toml").write_text("seed = 4\n[episode]\nmax_turns = 3\n")
    estimate = {"value": 0.25, "low": 0.1, "high": 0.4}
    (other / "eval.json").write_text(json.dumps({"pass_at_k": {"all": {"5": estimate}}}))
    text = write_comparison([run, other]).read_text()
    page = Page(text)
    assert (run / "comparison.html").read_text() == text
    assert page.fetched == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 2
    for shown in (run.name, other.name, "0.83", "all, pass@5", "25.0% (10.0% to 40.0%)", "episode.max_turns"):
        assert shown in page.text


def test_a_run_of_an_earlier_version_is_shown_without_what_it_does_not_hold(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    del summary["length_bias"], summary["worst"]
    (run / "summary.json").write_text(json.dumps(summary))
    page = Page(write_report(run).read_text())
    assert "given up late" not in page.text
    assert "0.83" in page.text


def test_settings_that_agree_are_not_listed(run: Path) -> None:
    text = write_comparison([run, run]).read_text()
    assert "Settings that differ" not in text
    assert f"{run.name} (2)" in text


def test_a_directory_without_results_is_named(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match=f"{empty.name} holds no summary.json or eval.json"):
        write_comparison([run, empty])


def test_progress_says_where_the_run_stands() -> None:
    seconds = iter([0.0, 1.0, 2.0, 3.0, 10.0, 11.0])
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    pool = PoolStats(
        warm_target=8, size_limit=9, starting=0, warm=7, active=5, waiting=0, deleting=0, acquired_total=1,
        released_total=1, expired_total=0, lost_total=1, started_total=1, start_failures_total=2,
        start_seconds=None,
    )  # fmt: skip
    with Progress(10, console=console, clock=lambda: next(seconds)) as progress:
        progress.say("starting the engine")
        progress.step({"step": 1.0, "solve_rate/all": 0.5, "perf/wait_time_ratio": 0.3}, pool)
        progress.step({"step": 2.0, "solve_rate/all": 0.6}, None)
    first, second, third = out.getvalue().splitlines()
    assert first == "[   1.0 s] starting the engine"
    assert "step 1/10, solved 0.50" in second
    assert "wait 30%" in second
    assert "sandboxes warm/active/failed 7/5/3" in second
    assert third.endswith("left 0.1 min")
