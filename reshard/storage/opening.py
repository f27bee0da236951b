"""Open a directory that holds a model, or an adapter alone."""

from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.lora.checkpoint import AdapterOnlyError
from reshard.storage.lora.megatron import MegatronAdapterSource
from reshard.storage.lora.opening import is_peft, open_adapter
from reshard.storage.lora.peft import PeftSource
from reshard.storage.lora.source import AdapterSource
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


def check_same_kind(a: Source, b: Source) -> None:
    """Raise ReshardError if one is an adapter and the other a model, which have no tensor in common."""
    if a.is_model is not b.is_model:
        adapter, model = (b, a) if a.is_model else (a, b)
        raise ReshardError(
            f"{adapter.path} is a LoRA adapter and {model.path} a model: reshard lora-merge adds the "
            "adapter to its model first"
        )


def note_untrained(source: Source) -> None:
    """Note of an adapter that it was not trained, where its numbers say so."""
    if isinstance(source, AdapterSource):
        source.note_untrained()
