"""Changes the weights of a model on a CPU in place, without vLLM's detour for formats of all kinds.

On a CPU vLLM computes with packed copies of its matrices and keeps no others. Its own reload gives each
layer new memory, fills it from the checkpoint, packs that, and copies what is left to where the old values
were. For a plain model all that is needed is to pack anew, straight out of the shared memory: half the time.
And packing leaves the model alone, so it can be done while the model still computes with the old copies.
A model that is not plain in every part is left to vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rl.generators.checks import TIED

PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"}
"""vLLM's classes for layers that compute with the numbers as they come."""

Names = tuple[str, ...]
Values = Callable[[Names], Tensor]
"""The values of these names, rows one after the other."""
Packed = list[tuple[Module, Any]]
"""Layers, each with what it will compute with."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Plan:
    """What becomes of every tensor. Where several names stand, their rows follow one another.

    `copied`: parameters that are used as they are. `packed`: layers that compute with a packed copy of their
    matrix; an output layer has the parameter beside it.
    """

    copied: list[tuple[Parameter, Names]] = field(default_factory=list)
    packed: list[tuple[Module, Names]] = field(default_factory=list)


def plan_repack(model: Module, shapes: Shapes) -> Plan | None:
    """How tensors of these names and shapes, in the model's own precision, go into it; None when that is not
    plain to see."""
    if not _only_stacks(getattr(model, "hf_to_vllm_mapper", None)):
        return None
    plan, used = Plan(), set[str]()
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        sources = _sources(model, name, shapes)
        if not sources or not _plain(module, parameter):
            return None
        kept = parameter.numel() > 0
        rows = sum(shapes[source][0] for source in sources)
        expected = tuple(parameter.shape) if kept else _matrix(module)
        if expected != (rows, *shapes[sources[0]][1:]):
            return None
        if kept:
            plan.copied.append((parameter, sources))
        else:
            plan.packed.append((module, sources))
        used.update(sources)
    if shapes.keys() - used - TIED:
        return None
    for head in _heads(model):
        plan.packed += [(head, names) for parameter, names in plan.copied if parameter is head.weight]
    return plan


def _only_stacks(mapper: Any) -> bool:
    """Whether vLLM's renaming of the model's tensors does no more than to put some behind one another."""
    rules = vars(mapper) if mapper is not None else {}
    return not any(rule for kind, rule in rules.items() if kind != "orig_to_new_stacked")


def _plain(module: Module, parameter: Parameter) -> bool:
    """Whether the layer takes the numbers as they come: some models have loaders that change them."""
    loader = getattr(parameter, "weight_loader", None)
    own = loader is None or getattr(loader, "__self__", None) is module
    return (own or getattr(loader, "__name__", "") == "default_weight_loader") and (
        type(getattr(module, "quant_method", None)).__name__ in PLAIN
    )


def _sources(model: Module, name: str, shapes: Shapes) -> Names:
    """The checkpoint's names for one of the model's parameters; none when it has none."""
    if name in shapes:
        return (name,)
    owner, _, kind = name.rpartition(".")
    parent, _, layer = owner.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(layer, ())
    found = tuple(f"{parent}.{part}.{kind}" for part in parts)
    return found if all(source in shapes for source in found) else ()


def _matrix(module: Module) -> tuple[int, ...]:
    """The shape of a matrix that is kept packed only."""
    if not hasattr(module, "cpu_linear"):
        return ()
    sizes = (getattr(module, f"{side}_size_per_partition", 0) for side in ("output", "input"))
    return tuple(int(size) for size in sizes)


def _heads(model: Module) -> list[Module]:
    """Output layers. An embedding has a packed copy, too, but nobody computes with it unless it is both."""
    modules = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    heads = [module for module in modules if type(module).__name__ == "ParallelLMHead"]
    return heads or [module for module in modules if type(module).__name__ == "VocabParallelEmbedding"]


def pack(plan: Plan, values: Values) -> Packed:
    """Packs the matrices; the model goes on with those that it has. It takes the room of all of them.

    Packing one matrix keeps one core busy, so as many are packed at once as the model computes with.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as packers:
        packing = [packers.submit(_pack, layer, values(names)) for layer, names in plan.packed]
    return [(layer, done.result()) for (layer, _), done in zip(plan.packed, packing, strict=True)]


def put_in(plan: Plan, packed: Packed, values: Values) -> None:
    """Has the model compute with the new values, of which `pack` made `packed`. It must stand still."""
    with torch.no_grad():
        for parameter, names in plan.copied:
            parameter.copy_(values(names))
    for layer, product in packed:
        layer.cpu_linear = product


def _pack(layer: Module, values: Tensor) -> Any:
    """Packs with vLLM's own function, on a stand-in: the layer's own weight went at its first packing."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    stand_in: Any = Module()
    stand_in.weight = Parameter(values, requires_grad=False)
    stand_in.bias = getattr(layer, "bias", None)
    dispatch_cpu_unquantized_gemm(stand_in, remove_weight=True)
    return stand_in.cpu_linear
