"""A PEFT directory, laid out before a byte is written."""

import json
from collections.abc import Iterable
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.formats import safetensors
from reshard.lora.names import A, peft_name
from reshard.lora.peft_config import CONFIG, WEIGHTS, written_config
from reshard.storage.destinations.huggingface import HuggingFaceFiles
from reshard.storage.io.streams import TensorInfo
from reshard.storage.lora.source import AdapterSource
from reshard.storage.quantized import Quantized


class PeftFiles(HuggingFaceFiles):
    """The ``adapter_model.safetensors`` and ``adapter_config.json`` of an adapter's `tensors`."""

    format = "peft"

    def __init__(self, source: AdapterSource, tensors: dict[str, TensorInfo]) -> None:
        scales = {w: scale for w, scale in source.scales.items() if peft_name(w, A) in tensors}
        self.config = written_config(scales, _linear_weights(source), source.base_name, source.parameters)
        super().__init__(source.model, frozenset(), tensors, Quantized(), None, {})

    def _plan_files(self, tensors: dict[str, tuple[Dtype, tuple[int, ...]]]) -> list[safetensors.NewFile]:
        return [safetensors.plan_file(tensors, WEIGHTS)]

    def small_files(self) -> dict[str, bytes | str]:
        return {CONFIG: json.dumps(self.config, indent=2) + "\n"}

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        fields = super().fields(family, source, quantized)
        del fields["quantized"]
        return fields


def _linear_weights(source: AdapterSource) -> Iterable[str]:
    """Return the published weights that PEFT may take for a target by the end of their names."""
    return (
        name for name, shape in source.base.shapes.items() if name.endswith(".weight") and len(shape) == 2
    )
