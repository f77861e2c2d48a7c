"""Models on disk: never half of one, and a mistake in the name is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.generator import UpdateFailed
from rl.generators.checks import check_weights
from rl.model import ChatTokenizer, ModelNotFound, prepare_model, write_directory


@pytest.mark.parametrize("name", ["no/such/directory", "SmolLM9"])
def test_a_model_that_is_not_there_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        prepare_model(name, tmp_path)
    message = str(caught.value)
    assert repr(name) in message
    assert "give the path of a model directory" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="safetensors"):
        prepare_model(str(tmp_path), tmp_path / "cache")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert prepare_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_tokenizer_without_the_chat_marks_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelNotFound, match="give the path of a ChatML model"):
        ChatTokenizer(tmp_path)


def test_a_directory_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def broken(directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(target, broken)
    assert list(tmp_path.iterdir()) == []
    write_directory(target, lambda directory: None)
    write_directory(target, lambda directory: None)  # as if another process had been first
    (target / "file").write_text("")
    write_directory(target, lambda directory: None)
    assert [path.name for path in target.iterdir()] == ["file"]


def test_weights_must_have_the_models_own_tensors(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    def directory(name: str, **shapes: tuple[int, ...]) -> Path:
        (tmp_path / name).mkdir()
        save_file(
            {key.replace("__", "."): np.zeros(shape, np.float32) for key, shape in shapes.items()},
            tmp_path / name / "model.safetensors",
        )
        return tmp_path / name

    model = directory("model", a=(2, 3), b=(4,))
    check_weights(directory("same", a=(2, 3), b=(4,)), model)
    check_weights(directory("tied", a=(2, 3), b=(4,), lm_head__weight=(2, 3)), model)
    for other in (directory("shape", a=(3, 2), b=(4,)), directory("less", b=(4,))):
        with pytest.raises(UpdateFailed, match="a is not as in"):
            check_weights(other, model)
    cut = directory("cut", a=(2, 3), b=(4,)) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(UpdateFailed, match="did not load"):
        check_weights(cut.parent, model)
