"""Weights that are prepared while the engine draws: nothing changes until they are put in, then all does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rl.generators.shared_memory import SharedMemoryEngine
from rl.segment import NotInSegment
from rl.shared_weights import SharedWeights
from rl.weights import open_segment_file

pytestmark = [
    pytest.mark.slow,
    # torch and vLLM use, while they are imported, what torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::DeprecationWarning:vllm"),
]

ROWS = torch.arange(64 * 64, dtype=torch.float32).remainder(31).view(64, 64) / 31
INPUT = torch.linspace(-1, 1, 5 * 64).view(5, 64)


def tensors(scale: float) -> dict[str, Tensor]:
    """A vector, and a matrix whose rows come in two tensors."""
    upper, lower = (scale * ROWS).split((16, 48))
    return {"norm.weight": scale * ROWS[1], "block.upper.weight": upper, "block.lower.weight": lower}


class Model(Module):
    """As vLLM leaves one on a CPU: a parameter, and a layer that keeps its matrix packed only."""

    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping = {"layer": ["upper", "lower"]}
        self.norm: Any = Module()
        self.block: Any = Module()
        self.norm.weight = Parameter(torch.zeros(64), requires_grad=False)
        layer: Any = Module()
        layer.weight = Parameter(torch.empty(0), requires_grad=False)
        layer.input_size_per_partition = layer.output_size_per_partition = 64
        layer.cpu_linear = None
        self.block.layer = layer

    def computed(self) -> Tensor:
        layer = self.block.layer
        return torch.cat([self.norm.weight[None], layer.cpu_linear(INPUT, layer.weight, None)])


class Worker:
    """An engine's side of a segment, into which `write` writes as the trainer does."""

    def __init__(self, path: Path) -> None:
        self._weights = SharedWeights(path, tensors(1.0), torch.float32)
        self._path = path
        self.model, self.engine = self.another()

    def another(self) -> tuple[Model, SharedMemoryEngine]:
        """One more model that takes its weights from here."""
        model, config = Model(), SimpleNamespace(world_size=1)
        vllm_config = SimpleNamespace(
            parallel_config=config, model_config=SimpleNamespace(dtype=torch.float32)
        )
        engine = SharedMemoryEngine(None, vllm_config, torch.device("cpu"), model)
        engine.init_transfer_engine(engine.parse_init_info({"path": str(self._path)}))
        return model, engine

    def write(self, version: int, scale: float) -> None:
        self._weights.write(version, tensors(scale))

    def update(self, version: int) -> Tensor:
        """What the model computes with the version."""
        self.engine.update_weights({"version": version})
        return self.model.computed()


def exact(scale: float) -> Tensor:
    return torch.cat([scale * ROWS[1:2], INPUT @ (scale * ROWS).T])


def check(computed: Tensor, scale: float) -> None:
    torch.testing.assert_close(computed, exact(scale), rtol=1e-4, atol=1e-4)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with open_segment_file(tmp_path) as path:
        worker = Worker(path)
        worker.write(1, 1.0)
        check(worker.update(1), 1.0)
        yield worker


def test_prepared_weights_change_nothing_until_they_are_put_in(worker: Worker) -> None:
    before = worker.model.computed()
    worker.write(2, 3.0)
    worker.engine.prepare(2).result()
    assert torch.equal(worker.model.computed(), before)
    model, engine = worker.another()
    engine.update_weights({"version": 2})  # without anything prepared
    after = worker.update(2)
    check(after, 3.0)
    assert torch.equal(after, model.computed())


def test_what_was_prepared_for_another_version_is_dropped(worker: Worker) -> None:
    worker.write(2, 3.0)
    worker.engine.prepare(2).result()
    worker.write(3, 5.0)
    check(worker.update(3), 5.0)
    check(worker.update(2), 3.0)


def test_a_version_is_prepared_once(worker: Worker) -> None:
    worker.write(2, 3.0)
    assert worker.engine.prepare(2) is worker.engine.prepare(2)
    check(worker.update(2), 3.0)


def test_a_version_overwritten_since_it_was_prepared_is_not_put_in(worker: Worker) -> None:
    before = worker.model.computed()
    worker.write(2, 3.0)
    worker.engine.prepare(2).result()
    worker.write(3, 5.0)
    worker.write(4, 7.0)
    for call in (worker.engine.prepare, worker.update):
        with pytest.raises(NotInSegment, match=r"weights 2 are not in the segment, which holds \[3, 4\]"):
            call(2)
    assert torch.equal(worker.model.computed(), before)
    check(worker.update(4), 7.0)
