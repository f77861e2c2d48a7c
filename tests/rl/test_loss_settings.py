"""The settings of the losses: their own numbers where none is set, one line for what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from rl.config import Config, TrainerConfig, load
from rl.config_faults import explain
from rl.losses.recipes import RECIPES, LossName, Objective


@pytest.mark.parametrize("name", get_args(LossName))
def test_numbers_that_are_not_set_are_the_losses_own(name: LossName) -> None:
    objective = TrainerConfig(loss=name).objective
    assert objective.loss == name
    assert {dial: getattr(objective, dial) for dial in RECIPES[name].dials} == RECIPES[name].dials


@pytest.mark.parametrize("name", get_args(LossName))
def test_a_written_out_file_reads_back(name: str, tmp_path: Path) -> None:
    config = load(None, {"trainer": {"loss": name}})
    (tmp_path / "run.toml").write_text(config.as_toml())
    assert load(tmp_path / "run.toml", {}) == config


def test_numbers_that_are_set_win() -> None:
    values = {"clip_low": 0.1, "clip_high": 0.3, "kl_coefficient": 0.01, "kl_estimator": "k2"}
    objective = TrainerConfig.model_validate({"loss": "dapo", **values}).objective
    assert objective == Objective("dapo", **values)  # type: ignore[arg-type]


def test_only_dr_grpo_leaves_advantages_undivided() -> None:
    undivided = [
        name
        for name in get_args(LossName)
        if not load(None, {"trainer": {"loss": name}}).advantage_rule.by_deviation
    ]
    assert undivided == ["dr_grpo"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer": {"loss": "ppo"}}, "trainer.loss = 'ppo': input should be 'tis', 'mis'"),
        ({"trainer": {"clip_low": 0.2}}, "trainer.clip_low = 0.2: loss 'tis' does not read it; leave it out"),
        ({"trainer": {"loss": "gspo", "ratio_cap": 3}}, "choose one of tis, mis, sequence_tis, sequence_mis"),
        ({"trainer": {"loss": "grpo", "length_tokens": 9}}, "loss 'grpo' does not read it"),
        ({"trainer": {"kl_estimator": "k1"}}, "input should be 'k2' or 'k3'"),
        ({"trainer": {"overlong_tokens": 193}}, "may sample only 192 tokens: make it smaller"),
        (
            {"trainer": {"lora_rank": 8}, "generator": {"servers": ["http://a:1"]}},
            "servers take no adapters: leave out trainer.lora_rank",
        ),
        ({"trainer": {"lora_rank": -1}}, "trainer.lora_rank = -1"),
        ({"episode": {"top_p": 0.9}}, "episode.top_p = 0.9: training draws from the whole policy"),
        ({"generator": {"temperature": 0.7}}, "without the sampling mask"),
        ({"top_k": 5}, "top_k = 5: training draws"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(values)
    assert message in explain(caught.value, Config)
    assert "\n" not in explain(caught.value, Config)


def test_shaping_knows_the_episodes_limit() -> None:
    values = {"trainer": {"overlong_tokens": 30}, "episode": {"max_turns": 2, "turn_tokens": 40}}
    rule = load(None, values).advantage_rule
    assert (rule.overlong_tokens, rule.limit_tokens) == (30, 80)
