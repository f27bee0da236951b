"""From what a user names to the system that runs it."""

from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.engines.vllm.layout import VllmLayout
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model
from reshard.parity.huggingface import HuggingFace
from reshard.parity.prompts import SERVED
from reshard.parity.systems import System
from reshard.storage.sources.base import read_config
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.paths import locate


def is_megatron(spec: str) -> bool:
    """Whether a path or hub id, with ``vllm:`` before it or not, is of a Megatron checkpoint."""
    return locate(local_directory(spec.removeprefix(SERVED))) is not None


def model_of(spec: str, hf_config: Path | None = None) -> Model:
    """The model that a path or hub id holds, with ``vllm:`` before it or not, by its config or args alone: no weight is
    read. Raises ReshardError where it is no checkpoint that can be opened."""
    path = local_directory(spec.removeprefix(SERVED))
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


def open_system(
    spec: str,
    dtype: str,
    layout: MegatronLayout,
    hf_config: Path | None = None,
    engine: VllmLayout | None = None,
    quantization: str | None = None,
    exact: bool = False,
) -> System:
    """A system from a path or hub id: a Hugging Face directory (transformers) or a Megatron checkpoint
    (Megatron-Core at `layout`).

    With ``vllm:`` before it vLLM serves it, at the sizes of `engine` and with `quantization`: a Hugging Face
    directory as vLLM loads it, a Megatron checkpoint by a refit from Megatron-Core, `exact` or not.
    """
    path = local_directory(spec.removeprefix(SERVED))
    megatron = is_megatron(spec)
    if spec.startswith(SERVED):
        from reshard.parity.vllm import RefittedVllm, Vllm  # not before: it imports vLLM

        if megatron:
            return RefittedVllm(path, dtype, layout, hf_config, engine, quantization, exact)
        return Vllm(path, dtype, engine, quantization)
    if megatron:
        from reshard.parity.megatron import Megatron

        return Megatron(path, dtype, layout, hf_config)
    return HuggingFace(path, dtype)
