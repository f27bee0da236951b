"""Open a directory that holds a model, or an adapter alone."""

from pathlib import Path

from reshard.lora.checkpoint import AdapterOnlyError
from reshard.storage.lora.megatron import MegatronAdapterSource
from reshard.storage.lora.opening import is_peft, open_adapter
from reshard.storage.lora.peft import PeftSource
from reshard.storage.sources.base import Source
from reshard.storage.sources.megatron import States
from reshard.storage.sources.opening import check_directory, open_source
from reshard.storage.sources.paths import locate


def open_model_or_adapter(
    path: Path, hf_config: Path | None = None, states: States = "none", alpha: float | None = None
) -> Source:
    """Open a directory of a model, or of an adapter alone; `states` are those of `MegatronSource`, `alpha` is that of
    a Megatron adapter that does not say it. Raises ReshardError if it is neither."""
    if alpha is not None:
        return open_adapter(path, hf_config, alpha)
    check_directory(path)
    if locate(path) is None and is_peft(path):
        return PeftSource(path, hf_config)
    try:
        return open_source(path, hf_config, states=states)
    except AdapterOnlyError:
        return MegatronAdapterSource(path, hf_config)
