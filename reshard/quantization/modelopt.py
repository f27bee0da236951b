"""Checkpoints of NVIDIA's Model Optimizer: in nvfp4 ``weight`` are codes, ``weight_scale`` their scales, and
``weight_scale_2`` is what those are multiplied by; in fp8 there is one scale for a matrix or for each row."""

from collections.abc import Mapping
from typing import Any

from reshard.core.errors import ReshardError
from reshard.quantization import fp8_scales
from reshard.quantization.channels import SCALE_SUFFIX
from reshard.quantization.nvfp4 import CODES, GROUP, stored_weight
from reshard.quantization.scheme import StoredTensor, StoredWeight

METHOD = "modelopt"
# Before version 0.31 the config was a file of its own, which vLLM reads where config.json says
# nothing.
CONFIG = "hf_quant_config.json"
GLOBAL_SCALE_SUFFIX = "_scale_2"
# With activations in nvfp4 too, and as they are.
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
READ = (
    f"of {METHOD} reshard reads {', '.join(ALGORITHMS + FP8_ALGORITHMS)}: convert the checkpoint that this one "
    "was made of"
)


def find_weights(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredWeight]:
    """Return the weights among a checkpoint's `tensors` that are nvfp4 or fp8, by name; those without
    scales are left as they are.

    Raises ReshardError if the ``quantization_config`` names another format, or what belongs to a
    weight does not add up.
    """
    fields = config.get("quantization", config)
    algorithm = fields.get("quant_algo") if isinstance(fields, Mapping) else None
    if str(algorithm).upper() in FP8_ALGORITHMS:
        return fp8_scales.find_weights(config, tensors, where)
    if str(algorithm).upper() not in ALGORITHMS:
        raise ReshardError(f"{where}: its quant_algo is {algorithm!r:.80}, and {READ}")
    if fields.get("group_size") not in (None, GROUP):
        raise ReshardError(
            f"{where}: its group_size is {fields['group_size']!r:.80}, not {GROUP}, and {READ}"
        )
    weights: dict[str, StoredWeight] = {}
    for part in tensors:
        name = part.removesuffix(GLOBAL_SCALE_SUFFIX).removesuffix(SCALE_SUFFIX)
        if not name.endswith(".weight") or (part == name and tensors[part].dtype != CODES):
            continue
        if name not in tensors:
            raise ReshardError(f"{where}: {part} does not belong to codes, {name}")
        if name not in weights:
            parts = name, name + SCALE_SUFFIX, name + GLOBAL_SCALE_SUFFIX
            weights[name] = stored_weight(name, parts, tensors, False, where)
    return weights


def check_can_quantize(config: Mapping[str, Any], what: str) -> None:
    """Raise ReshardError unless `config` wants weights that can be made of plain ones: nvfp4 with
    plain activations."""
    fields = config.get("quantization", config)
    algorithm = fields.get("quant_algo") if isinstance(fields, Mapping) else fields
    if str(algorithm).upper() != ALGORITHMS[1]:
        raise ReshardError(
            f"{what} wants weights quantized by {METHOD} as {algorithm!r:.80}, and of these reshard makes "
            f"{ALGORITHMS[1]} alone, since a Megatron checkpoint has no scales of activations: serve it with "
            "a config that says that, or none"
        )
