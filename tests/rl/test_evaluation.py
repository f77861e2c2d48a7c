"""The line that tells a person how a held-out measurement went."""

from __future__ import annotations

from dataclasses import replace

from rl.evaluation import Evaluation

MEASURED = Evaluation(
    overall=0.5,
    families={"sums": 0.5},
    benchmark=0.25,
    kinds={"sums_2": 0.5, "words_1": 0.0},
    attempts=8,
    unscored=0,
    seconds=12.4,
)


def test_a_line_has_what_was_measured_and_nothing_else() -> None:
    assert MEASURED.describe() == "all levels 50%, benchmark 25% (sums_2 50%, words_1 0%) in 12 s"
    without = replace(MEASURED, benchmark=None, kinds={})
    assert without.describe() == "all levels 50% in 12 s"
    lost = replace(without, overall=None, unscored=8)
    assert lost.describe() == "nothing scored in 12 s; 8 of 8 lost to infrastructure"
