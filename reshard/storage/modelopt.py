"""Which weights of a Hugging Face directory NVIDIA's Model Optimizer has quantized as nvfp4: ``weight`` are their codes, ``weight_scale``
the scales, and ``weight_scale_2`` is what those are multiplied by.

What is quantized is said in ``config.json``, or, before version 0.31, in a file of its own, which vLLM reads where a config says nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.formats.safetensors import Tensor
from reshard.formats.small_files import read_json
from reshard.storage.channels import SUFFIX
from reshard.storage.dequantized import Codes, fp4_codes
from reshard.storage.nvfp4 import CODES, GROUP

METHOD = "modelopt"
CONFIG = "hf_quant_config.json"
SECOND_SUFFIX = "_scale_2"
# With activations in nvfp4 too, and as they are.
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
READ = (
    f"of {METHOD} reshard reads {' and '.join(ALGORITHMS)}: convert the checkpoint that this one was made of"
)


def quantization_beside(path: Path, stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the file beside ``config.json`` says, of a directory with weights that are stored so; nothing for others."""
    if any(name.endswith(f".weight{SECOND_SUFFIX}") for name in stored) and (path / CONFIG).is_file():
        return read_json(path / CONFIG) | {"quant_method": METHOD}
    return {}


def optimized(config: Mapping[str, Any], stored: Mapping[str, Tensor], where: str) -> dict[str, Codes]:
    """The weights among `stored` that are nvfp4, by name; those that are kept, for whatever reason, have no scales. Raises ReshardError
    where the ``quantization_config`` says what is not read, or what belongs to a weight does not add up."""
    said = config.get("quantization", config)
    algorithm = said.get("quant_algo") if isinstance(said, Mapping) else None
    if str(algorithm).upper() not in ALGORITHMS:
        raise ReshardError(f"{where}: its quant_algo is {algorithm!r:.80}, and {READ}")
    if said.get("group_size") not in (None, GROUP):
        raise ReshardError(f"{where}: its group_size is {said['group_size']!r:.80}, not {GROUP}, and {READ}")
    found = {}
    for part in stored:
        name = part.removesuffix(SECOND_SUFFIX).removesuffix(SUFFIX)
        if not name.endswith(".weight") or (part == name and stored[part].dtype != CODES):
            continue
        if name not in stored:
            raise ReshardError(f"{where}: {part} does not belong to codes, {name}")
        if name not in found:
            found[name] = fp4_codes((name, name + SUFFIX, name + SECOND_SUFFIX), stored, where, False)
    return found
