"""Loading a Megatron checkpoint, by an option of SGLang's own.

    --model-path DST/hf --model-loader-extra-config '{"megatron": "DST"}'

``--load-format`` takes only SGLang's own names, which it checks before plugins are loaded. So SGLang finds config
and tokenizer by its model path, and the plugin gives the weights in the place of its files, by their published
names, to SGLang's own loader. Every rank reads all of them.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError, listed
from reshard.engines.checkpoint import config_directory, megatron_directory, wants_fp8_blocks
from reshard.engines.sglang import compat
from reshard.engines.stored_weights import StoredWeights, names_in_blocks
from reshard.models.config_fields import ignore_hint_for
from reshard.models.model import Model
from reshard.storage.io.reading import weights_of_megatron
from reshard.storage.sources.megatron import MegatronSource

OPTION = "megatron"
logger = logging.getLogger("sglang.srt.reshard")  # below SGLang's own, which shows it


def choose_loader(get_loader: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return SGLang's loader, or one that takes its weights from the Megatron checkpoint that the option
    names."""
    extra = load_config.model_loader_extra_config or {}
    if OPTION not in extra:
        return get_loader(load_config, *args, **kwargs)
    others = sorted(set(extra) - {OPTION})
    if others or not isinstance(extra[OPTION], str):
        raise ReshardError(
            f"--model-loader-extra-config has {listed(others)} beside {OPTION!r}: it takes that one alone"
            if others
            else f"{OPTION!r} in --model-loader-extra-config is {extra[OPTION]!r:.80}, not a directory"
        )
    return compat.loader_of(load_config, partial(stream_megatron, extra[OPTION]))


def stream_megatron(
    place: str, model_config: Any, model: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of a Megatron checkpoint by their published names, in blocks of fp8 where SGLang's
    config wants that.

    Raises ReshardError, before the first, if it is none, or of another model than SGLang's config.
    """
    with ignore_hint_for("engine"):
        weights = _open(Path(place), model_config)
    logger.info("%s: %d tensors", weights.name, len(weights.weights.tensors))
    return weights.stream_and_close()


def _open(path: Path, model_config: Any) -> StoredWeights:
    directory = megatron_directory(path) if path.is_dir() else None
    if directory is None:
        raise ReshardError(
            f"{path} is no Megatron checkpoint: leave out {OPTION!r} of --model-loader-extra-config to serve a "
            f"Hugging Face directory"
        )
    beside = config_directory(str(model_config.model_path), model_config.revision)
    wanted = getattr(model_config.hf_config, "quantization_config", None) or {}
    source = MegatronSource(directory, beside)
    try:
        if wanted and not wants_fp8_blocks({"quantization_config": wanted}, directory):
            raise ReshardError(
                f"the config in {beside} wants weights quantized as {wanted.get('quant_method')!r:.80}, which is "
                f"not made while SGLang loads: convert it with reshard mcore-to-hf --quantize, and serve that"
            )
        weights = StoredWeights(str(directory), weights_of_megatron(source), names_in_blocks(source, wanted))
        weights.check_complete(Model.from_hf(source.model.config, f"the config in {beside}"))
    except BaseException:
        source.close()
        raise
    return weights
