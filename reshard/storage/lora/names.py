"""Names that programs give to the matrices of a LoRA adapter, and PEFT's names that they stand for.

What is read of a model's names is read of an adapter's: those of a compiled or wrapped model, of a base model
without a head, of a transformers model in memory; and names with PEFT's name of the adapter, or without its prefix.
"""

import re
from collections.abc import Collection, Iterable

from reshard.core.views import tensor_of
from reshard.lora.experts import ExpertsParameter
from reshard.lora.names import PEFT_PREFIX, module_of
from reshard.megatron.parameters import ModelParameters
from reshard.models.model import Model
from reshard.storage.sources.spellings import PREFIXES, WRAPPER_PREFIX, WRAPPERS

_MATRIX = re.compile(r"(?P<module>.+)\.(?P<matrix>lora_[AB])\.(?:[^.]+\.)?weight")


def module_in_file(name: str) -> str:
    """Return the name that the module of a matrix has in a file, which is the one that its program knows it by; empty
    for what is no matrix."""
    match = _MATRIX.fullmatch(name)
    return "" if match is None else _module(match)[0]


def _module(match: re.Match[str]) -> tuple[str, bool]:
    """Return the module that a name of a matrix tells, and whether it lies below another adapter."""
    module = match["module"]
    for wrapper in WRAPPERS:
        module = module.replace(wrapper, "")
    module = module.removeprefix(WRAPPER_PREFIX).removeprefix(PEFT_PREFIX)
    return module.removesuffix(".base_layer"), module.endswith(".base_layer")


def peft_names(
    names: Collection[str], base: ModelParameters, model: Model, experts: Iterable[ExpertsParameter]
) -> dict[str, str]:
    """Return PEFT's name of each of these tensors of an adapter of a model, by its name in a file; the same name for
    one that is no matrix of a layer of the model. All have their own names if two would have one."""
    of_experts = {module for parameter in experts for module in parameter.modules}
    published = {module_of(tensor_of(name)) for name in base.shapes} | of_experts
    in_memory = {
        module_of(name): module_of(weight)
        for name, weight in model.names_in_memory().items()
        if name.endswith(".weight")
    }
    first = model.published_name(model.family.ends[0][1]).rpartition(".")[
        0
    ]  # what the layers' names begin with

    def named(name: str) -> str:
        match = _MATRIX.fullmatch(name)
        if match is None:
            return name
        module, below = _module(match)
        spellings = (module, *(f"{first}.{module.removeprefix(p)}" for p in PREFIXES if module.startswith(p)))
        for spelling in spellings:
            for each in (spelling, in_memory.get(spelling, "")):
                if each in published:
                    return f"{PEFT_PREFIX}{each}{'.base_layer' * below}.{match['matrix']}.weight"
        return name

    renamed = {name: named(name) for name in names}
    return renamed if len({*renamed.values()}) == len(renamed) else {name: name for name in names}
