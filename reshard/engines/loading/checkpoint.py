"""A checkpoint's directories, and what its config wants: for an engine that loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.quantization import compressed_tensors, modelopt
from reshard.quantization.fp8_blocks import BLOCK
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.paths import locate

CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


def config_directory(config: str, revision: str | None) -> Path:
    """Return the directory of a model's config and tokenizer, given as a path or as a hub id, of
    which only these are fetched."""
    is_hub_id = revision is not None and not Path(config).is_dir()
    return local_directory(f"{config}@{revision}" if is_hub_id else config, CONFIG_FILES)


def megatron_directory(path: Path) -> Path | None:
    """Return the directory of the iteration that a path means, or None if it is no Megatron
    checkpoint."""
    located = locate(path)
    return None if located is None else located.directory


def wants_fp8_blocks(config: Mapping[str, Any], directory: Path) -> bool:
    """Tell whether a config wants weights as fp8 blocks.

    False for a config without quantization, and for one by compressed-tensors or by ModelOpt
    (nvfp4, weights only) that can be made of Megatron's plain weights. Raises ReshardError if it
    wants them quantized in another way.
    """
    wanted = config.get("quantization_config")
    if not wanted:
        return False
    method = wanted.get("quant_method")
    if method == compressed_tensors.METHOD:
        compressed_tensors.check_can_quantize(wanted, f"the config for {directory}")
        return False
    if method == modelopt.METHOD:
        modelopt.check_can_quantize(wanted, f"the config for {directory}")
        return False
    if method != "fp8" or list(wanted.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        raise ReshardError(
            f"the config for {directory} wants weights quantized as {method!r:.80}, and a "
            f"Megatron checkpoint has others: serve it with a config that has no quantization_config"
        )
    return True
