"""Which kind of source a directory is: a Hugging Face directory or a Megatron checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.formats import torch_dist
from reshard.megatron.towers import takes_tower
from reshard.models.model import Model
from reshard.models.without_table import any_model
from reshard.storage.run.partial import unfinished
from reshard.storage.sources.base import Source, ignored_as_recorded, read_config
from reshard.storage.sources.fsdp import FsdpSource, locate_fsdp
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.megatron import MegatronSource, States
from reshard.storage.sources.paths import ITERATION, check_config, locate

EXPECTED = "give the directory of a Hugging Face or a Megatron checkpoint"


def open_source(
    path: Path,
    hf_config: Path | None = None,
    family: str | None = None,
    dequantize_to: Dtype | None = None,
    states: States = "none",
) -> Source:
    """Open a directory of any format; `states` are those of `MegatronSource`. Raises ReshardError if it is
    none."""
    check_directory(path)
    if locate(path) is not None and locate_fsdp(path) is None:
        return MegatronSource(path, hf_config, family, states=states)
    return open_published(path, hf_config, dequantize_to, any_model)


def open_published(
    path: Path,
    hf_config: Path | None = None,
    dequantize_to: Dtype | None = None,
    read: Callable[[dict[str, Any], str], Model] = Model.from_hf,
) -> HuggingFaceSource:
    """Open a directory whose tensors have a transformers model's names: Hugging Face's, or a checkpoint of a trainer
    under FSDP. `read` makes the model of its config. Raises ReshardError if it is neither."""
    located = locate_fsdp(path) if path.is_dir() else None
    if located is not None:
        return FsdpSource(path, located, hf_config, read)
    if read is any_model:
        check_huggingface(path)
    return HuggingFaceSource(path, dequantize_to, read)


def check_directory(path: Path) -> None:
    """Raise ReshardError if a path is no directory, or one that was not finished."""
    left = None if (path / "config.json").is_file() else unfinished(path)
    if left is not None and (not path.exists() or locate(path) is None):
        raise ReshardError(left)
    if not path.exists():
        is_hub_id = not path.is_absolute() and str(path).count("/") == 1 and not path.parent.exists()
        hint = (
            "a hub id is taken by hf-to-mcore, inspect, diff, parity, plan and memory"
            if is_hub_id
            else EXPECTED
        )
        raise ReshardError(f"{path} does not exist: {hint}")
    if not path.is_dir():
        raise ReshardError(f"{path} is not a directory: {EXPECTED}")


def with_larger_model(source: Source) -> Model:
    """Return a source's model, with the published config of the larger model around it where it is in one."""
    path = source.hf_files().get("config.json")
    return source.model if path is None else takes_tower(source.model, read_config(path))


def check_config_is_read(hf_config: str | Path | None, *paths: Path) -> None:
    """Raise ReshardError for a config that is read with none of these directories: one of Hugging Face's has
    its own."""
    if hf_config is None or not all(
        (path / "config.json").is_file() and locate(path) is None for path in paths
    ):
        return
    configs = " and ".join(dict.fromkeys(str(path / "config.json") for path in paths))
    raise ReshardError(
        f"--hf-config is for a Megatron or FSDP checkpoint or an adapter, and a Hugging Face directory has its "
        f"own, here {configs}: leave it out"
    )


def check_huggingface(path: Path) -> None:
    """Raise ReshardError if a directory that is not a Megatron checkpoint is not a Hugging Face directory
    either."""
    check_config(path)
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return
    if ITERATION.fullmatch(path.name) or any(path.glob("*.distcp")):
        raise ReshardError(f"{path} has no .metadata: it is not a torch_dist checkpoint, or not complete")
    raise ReshardError(
        f"{path} is neither a Hugging Face directory (config.json) nor a Megatron torch_dist checkpoint "
        f"({torch_dist.TRACKER})"
    )


def read_model(path: str | Path) -> Model:
    """Return the model that a config describes: a ``config.json``, a directory of either format, or
    a hub id, of which only the config is fetched. Raises ReshardError if it cannot be read."""
    if Path(path).is_file():
        return any_model(read_config(Path(path)), str(path))
    directory = local_directory(str(path), ["config.json"])
    if (directory / "config.json").is_file():
        with ignored_as_recorded(directory):
            return any_model(read_config(directory / "config.json"), str(directory / "config.json"))
    source = open_source(directory)
    try:
        return source.model
    finally:
        source.close()
