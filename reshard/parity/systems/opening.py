"""Open the system that a path, a hub id or ``vllm:`` and one of them names."""

from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.prompts import VLLM_PREFIX
from reshard.parity.systems.base import System, SystemOptions
from reshard.parity.systems.huggingface import HuggingFace
from reshard.storage.sources.base import read_config
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.paths import locate


def is_megatron(spec: str) -> bool:
    """Return True if a path or hub id, with or without ``vllm:``, is a Megatron checkpoint."""
    return locate(local_directory(spec.removeprefix(VLLM_PREFIX))) is not None


def model_of(spec: str, hf_config: Path | None = None) -> Model:
    """Read the model of a path or hub id, with or without ``vllm:``, from its config or args; no
    weight is read.

    Raises ReshardError where it is no checkpoint that can be opened."""
    path = local_directory(spec.removeprefix(VLLM_PREFIX))
    if not is_megatron(spec):
        if not (path / "config.json").is_file():
            raise ReshardError(
                f"{path} is no checkpoint: it has no config.json, and nothing that Megatron wrote"
            )
        return Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
    source = open_source(path, hf_config)
    try:
        return source.model
    finally:
        source.close()


def open_system(spec: str, options: SystemOptions) -> System:
    """Open a path or hub id as a system: a Hugging Face directory in transformers, a Megatron
    checkpoint in Megatron-Core.

    With ``vllm:`` before it vLLM serves it: a Hugging Face directory as vLLM loads it, a Megatron
    checkpoint by a refit from Megatron-Core.
    """
    path = local_directory(spec.removeprefix(VLLM_PREFIX))
    megatron = is_megatron(spec)
    if spec.startswith(VLLM_PREFIX):
        from reshard.parity.systems.refitted import RefittedVllm  # imports vLLM
        from reshard.parity.systems.vllm import Vllm

        return RefittedVllm(path, options) if megatron else Vllm(path, options)
    if megatron:
        from reshard.parity.systems.megatron import Megatron

        return Megatron(path, options.dtype, options.layout, options.hf_config)
    return HuggingFace(path, options.dtype)
