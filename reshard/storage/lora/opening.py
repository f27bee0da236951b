"""Which kind of adapter a directory holds: PEFT's, or a Megatron checkpoint's."""

from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.core.limits import check_positive
from reshard.models.model import Model
from reshard.storage.lora.megatron import MegatronAdapterSource
from reshard.storage.lora.peft import PeftSource
from reshard.storage.lora.source import AdapterSource
from reshard.storage.run.partial import unfinished
from reshard.storage.sources.paths import ADAPTER, locate

EXPECTED_ADAPTER = (
    "give a PEFT directory (adapter_config.json), or a Megatron checkpoint of Megatron-Bridge or mcore-bridge"
)


def open_adapter(
    path: Path,
    hf_config: Path | None = None,
    alpha: float | None = None,
    tp: int | None = None,
    model: Model | None = None,
) -> AdapterSource:
    """Open the LoRA adapter in a directory of PEFT's or in a Megatron checkpoint, alone or beside its base
    model; of `model`, or of the one that `hf_config` describes. Raises ReshardError if it has no adapter."""
    if alpha is not None:
        check_positive(alpha, "--alpha")
    if not path.is_dir():
        raise ReshardError(unfinished(path) or f"{path} is not a directory: {EXPECTED_ADAPTER}")
    if locate(path) is not None:
        return MegatronAdapterSource(path, hf_config, alpha=alpha, swiglu_ranks=tp, model=model)
    if is_peft(path):
        if alpha is not None:
            raise ReshardError(f"--alpha contradicts {path / ADAPTER}, which says it: leave it out")
        if tp is not None:
            raise ReshardError(
                "the tensor-parallel size with which an adapter was saved is that of a Megatron "
                f"checkpoint, and {path} is PEFT's: leave the option out"
            )
        return PeftSource(path, hf_config, model)
    raise ReshardError(f"{path} holds no LoRA adapter: {EXPECTED_ADAPTER}")


def is_peft(path: Path) -> bool:
    """Return True for a directory with an adapter of PEFT's, and no model."""
    return (path / ADAPTER).is_file() and not (path / "config.json").is_file()
