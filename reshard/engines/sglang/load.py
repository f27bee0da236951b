"""Loading a Megatron checkpoint, by an option of SGLang's own.

    --model-path DST/hf --model-loader-extra-config '{"megatron": "DST"}'

``--load-format`` takes only SGLang's own names, which it checks before plugins are loaded. So SGLang finds config
and tokenizer by its model path, and the plugin gives the weights in the place of its files, by their published
names, to SGLang's own loader. If that only copies, each rank reads the boxes that it would copy, straight to
where it would copy them, and the loader gets nothing more. Else it gets whole tensors; of layers in fp8 blocks,
those that this rank takes a part of.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.limits import check_switch
from reshard.engines.loading.checkpoint import config_directory, megatron_directory, wants_fp8_blocks
from reshard.engines.loading.stored_boxes import Reading, check_boxes, read_boxes
from reshard.engines.loading.stored_weights import StoredWeights, names_in_blocks
from reshard.engines.sglang import compat
from reshard.engines.sglang.weights.derived import DerivedTensors
from reshard.engines.sglang.weights.supported import PLAIN_METHODS
from reshard.engines.sglang.weights.traced import trace_model
from reshard.engines.tracing.trace import Trace
from reshard.models.config_fields import ignore_hint_for
from reshard.models.model import Model
from reshard.storage.io.reading import weights_of_megatron
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.verify import check_listed

OPTION, VERIFY = "megatron", "verify"
logger = logging.getLogger("sglang.srt.reshard")  # below SGLang's own, which shows it


def choose_loader(get_loader: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return SGLang's loader, or one that takes its weights from the Megatron checkpoint that the option
    names."""
    extra = load_config.model_loader_extra_config or {}
    if OPTION not in extra:
        return get_loader(load_config, *args, **kwargs)
    others, verify = sorted(set(extra) - {OPTION, VERIFY}), extra.get(VERIFY, False)
    check_switch(verify, f"{VERIFY} in --model-loader-extra-config")
    if others or not isinstance(extra[OPTION], str):
        raise ReshardError(
            f"--model-loader-extra-config has {listed(others)} beside {OPTION!r}: it takes {VERIFY!r} alone"
            if others
            else f"{OPTION!r} in --model-loader-extra-config is {extra[OPTION]!r:.80}, not a directory"
        )
    return compat.loader_of(load_config, partial(stream_megatron, extra[OPTION], verify))


def stream_megatron(
    place: str, verify: bool, model_config: Any, model: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of a Megatron checkpoint by their published names, in blocks of fp8 where SGLang's
    config wants that; nothing if they are in the model already.

    To `verify` compares all tensors with the checkpoint's manifest first. Raises ReshardError, before the
    first, if it is none, of another model than SGLang's config, or not as it was written.
    """
    with ignore_hint_for("engine"):
        weights = _open(Path(place), model_config, verify)
    reading = _plan_reading(model, weights, model_config.dtype)
    stream = weights.stream_and_close() if reading.trace is None else _read(model, weights, reading.trace)
    logger.info("%s: %d tensors, %s", weights.name, len(weights.weights.tensors), reading)
    return stream


def _plan_reading(model: torch.nn.Module, weights: StoredWeights, dtype: torch.dtype) -> Reading:
    """Return how to read the weights. Of those that this rank takes whole, `weights` is told the names."""
    try:
        views = weights.views()
        trace = views.of_trace(trace_model(model, weights.stored(views), dtype))
        if weights.quantized:
            weights.taken = frozenset(copy.name for copy in trace.copies)
            raise ReshardError(f"{len(weights.taken)} of them, for fp8 blocks")
        for name, module in model.named_modules():
            kind = type(getattr(module, "quant_method", None)).__name__
            if kind not in ("NoneType", *PLAIN_METHODS) and not compat.is_cache(module):
                raise ReshardError(f"{name} is loaded by {kind}")
        idle = compat.idle_indexers(model)
        check_boxes(
            model, trace, views, {name for name, _ in model.named_parameters() if name.startswith(idle)}
        )
    except ReshardError as error:
        return Reading(None, str(error))
    return Reading(trace)


def _read(model: torch.nn.Module, weights: StoredWeights, trace: Trace) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the boxes of a trace, and let the model derive what it derives from them; return nothing more to load."""
    began = time.perf_counter()
    with closing(weights), weights.weights.unchanged():
        read_boxes(model, trace, weights.weights)
        read = f"{weights.weights.read_bytes:,} bytes"
    DerivedTensors(model).update()
    logger.info("%s: %s read in %.1f s", weights.name, read, time.perf_counter() - began)
    return iter(())


def _open(path: Path, model_config: Any, verify: bool) -> StoredWeights:
    directory = megatron_directory(path) if path.is_dir() else None
    if directory is None:
        raise ReshardError(
            f"{path} is not a Megatron checkpoint: leave out {OPTION!r} of --model-loader-extra-config to serve a "
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
        if verify:
            tensor_parallel = compat.parallel().tp
            check_listed(source, tensor_parallel.rank, tensor_parallel.ranks)
        weights.check_complete(Model.from_hf(source.model.config, f"the config in {beside}"))
    except BaseException:
        source.close()
        raise
    return weights
