"""Open the system that a path or a hub id names, alone or after an engine's name, as in ``vllm:DIRECTORY``."""

from importlib import import_module
from pathlib import Path

from reshard.comm.http import is_address
from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.served import ENGINES, checkpoint_of, engine_of, place_of
from reshard.parity.systems.base import System, SystemOptions
from reshard.parity.systems.huggingface import HuggingFace
from reshard.storage.sources.base import read_config
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.paths import check_config, locate


def is_megatron(spec: str) -> bool:
    """Return True if a system, with or without an engine, is a Megatron checkpoint."""
    place = place_of(spec)
    return not is_address(place) and locate(local_directory(place)) is not None


def check_one_of_each(a: str, b: str) -> None:
    """Raise ReshardError unless one system is a Hugging Face directory that transformers runs, and the other one a
    Megatron checkpoint."""
    if engine_of(a) or engine_of(b) or sorted(map(is_megatron, (a, b))) != [False, True]:
        raise ReshardError(
            f"{a} and {b} must be a Hugging Face directory and a Megatron checkpoint: only "
            f"those can be compared inside"
        )


def model_of(spec: str, hf_config: Path | None = None) -> Model:
    """Read the model of a system, with or without an engine, from its config or args; no weight is
    read.

    Raises ReshardError if it is no checkpoint that can be opened."""
    path = local_directory(checkpoint_of(spec))
    if not is_megatron(spec):
        # An engine may have its weights from elsewhere, as a server of a Megatron checkpoint has.
        check_config(path, has_weights=engine_of(spec) is None)
        if not (path / "config.json").is_file():
            raise ReshardError(
                f"{path} is not a checkpoint: it has no config.json, and nothing that Megatron wrote"
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

    After an engine's name that engine serves it: a Hugging Face directory as the engine loads it, a
    Megatron checkpoint by a refit from Megatron-Core (vLLM) or as reshard's plugin loads it (SGLang), or what
    a server at this address serves.
    """
    engine, megatron = engine_of(spec), is_megatron(spec)
    if engine:
        open_served: System = import_module(ENGINES[engine].module).open_served(
            place_of(spec), megatron, options
        )
        return open_served
    path = local_directory(spec)
    if megatron:
        from reshard.parity.systems.megatron import Megatron

        return Megatron(path, options.dtype, options.layout, options.hf_config)
    return HuggingFace(path, options.dtype)
