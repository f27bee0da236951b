"""A PEFT directory, laid out before a byte is written."""

import json
from collections.abc import Iterable
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.formats import safetensors
from reshard.lora.names import PEFT_PREFIX, A, B, module_of, peft_name
from reshard.lora.peft_config import CONFIG, WEIGHTS, written_config
from reshard.models.model import Model
from reshard.storage.destinations.huggingface import HuggingFaceFiles
from reshard.storage.io.streams import TensorInfo
from reshard.storage.lora.source import AdapterSource
from reshard.storage.quantized import Quantized


class PeftFiles(HuggingFaceFiles):
    """The ``adapter_model.safetensors`` and ``adapter_config.json`` of an adapter's `tensors`.

    PEFT looks for modules by their names in a transformers model, which published names are not always.
    """

    format = "peft"

    def __init__(self, source: AdapterSource, tensors: dict[str, TensorInfo]) -> None:
        scales = {w: scale for w, scale in source.scales.items() if peft_name(w, A) in tensors}
        in_memory = modules_in_memory(source.model)
        self.config = written_config(
            scales, _linear_weights(source), source.base_name, source.parameters, in_memory
        )
        packed = {
            name: f"{PEFT_PREFIX}{in_memory[module]}{name.removeprefix(PEFT_PREFIX + module)}"
            for weight in scales
            if (module := module_of(weight)) in in_memory
            for name in (peft_name(weight, A), peft_name(weight, B))
        }
        super().__init__(source.model, frozenset(), tensors, Quantized(), None, {}, packed)

    def _plan_files(self, tensors: dict[str, tuple[Dtype, tuple[int, ...]]]) -> list[safetensors.NewFile]:
        return [safetensors.plan_file(tensors, WEIGHTS)]

    def small_files(self) -> dict[str, bytes | str]:
        return {CONFIG: json.dumps(self.config, indent=2) + "\n"}

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        fields = super().fields(family, source, quantized)
        del fields["quantized"]
        return fields


def modules_in_memory(model: Model) -> dict[str, str]:
    """Return the names in a transformers model of modules that are published under others, by those; but of experts,
    which it has in one tensor."""
    return {
        module_of(published): module_of(name)
        for name, published in model.names_in_memory().items()
        if name != published and name.endswith(".weight") and ".experts." not in published
    }


def _linear_weights(source: AdapterSource) -> Iterable[str]:
    """Return the published weights that PEFT may take for a target by the end of their names; none of a model that may
    have modules of the same ends beside its language model."""
    if any(source.model.family.in_memory_prefix):
        return ()
    return (
        name for name, shape in source.base.shapes.items() if name.endswith(".weight") and len(shape) == 2
    )
