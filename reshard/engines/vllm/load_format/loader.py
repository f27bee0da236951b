"""``--load-format reshard``: vLLM takes its weights from a Megatron checkpoint, or a Hugging Face
directory.

If vLLM's own ``load_weights`` only copies, each rank reads the boxes that it would copy, straight
to where it would copy them. Else, for a model that is quantized while it loads or an architecture
without a table, it gets whole tensors by their published names, as from a Hugging Face directory.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.core.extras import importing

with importing("vllm"):
    import torch
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader


from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.limits import check_switch
from reshard.engines.loading.checkpoint import config_directory, megatron_directory
from reshard.engines.loading.stored_boxes import read_boxes
from reshard.engines.vllm.compat import tensor_parallel
from reshard.engines.vllm.load_format.boxes import plan_reading
from reshard.engines.vllm.load_format.opened import OpenedWeights, directory_of, open_weights
from reshard.engines.vllm.weights.supported import CACHE_METHOD, loading_method
from reshard.megatron.parameters import expand
from reshard.models.without_table import any_model
from reshard.storage.sources.base import read_config
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.verify import check_listed

logger = logging.getLogger("vllm.reshard")  # below vLLM's own, which shows it


class ReshardModelLoader(BaseModelLoader):
    """A loader by vLLM's interface.

    With ``{"whole_tensors": true}`` in ``model_loader_extra_config``, every rank reads all tensors,
    and vLLM's ``load_weights`` takes what it needs. With ``{"verify": true}`` all tensors are compared with the
    checkpoint's manifest before they are loaded.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra: Any = load_config.model_loader_extra_config or {}
        unknown = sorted(set(extra) - {"whole_tensors", "verify"})
        if unknown:
            raise ReshardError(
                f"--model-loader-extra-config has {listed(unknown)}, of which --load-format reshard knows "
                f"nothing: it takes whole_tensors and verify"
            )
        self.whole_tensors = bool(extra.get("whole_tensors", False))
        self.verify: bool = extra.get("verify", False)
        check_switch(self.verify, "verify in --model-loader-extra-config")

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch a model from the hub."""
        directory_of(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill the parameters of a model as vLLM has made it, before it processes them.

        Raises ReshardError if the weights are of another model, or cannot be read.
        """
        began = time.perf_counter()
        with closing(open_weights(model_config)) as opened, opened.weights.unchanged():
            _check_complete(opened, model_config)
            if self.verify:
                _check_listed(model_config)
            opened.quantize_as(model)
            reading = plan_reading(model, model_config, opened, self.whole_tensors)
            if reading.trace is not None:
                read_boxes(model, reading.trace, opened.weights)
            else:
                loaded = model.load_weights(opened.stream())  # type: ignore[operator]
                _check_loaded(model, model_config, loaded)
            read, seconds = f"{opened.weights.read_bytes:,} bytes", time.perf_counter() - began
            logger.info("%s: %s read in %.1f s, %s", opened.name, read, seconds, reading)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return every tensor with its published name, for vLLM's ``reload_weights``.

        Raises ReshardError at once if they are of another model, or cannot be read: vLLM has
        dropped nothing by then, and goes on serving.
        """
        _check_same_model(directory_of(model_config), model_config)
        opened = open_weights(model_config)
        try:
            _check_complete(opened, model_config)
            if self.verify:
                _check_listed(model_config)
            opened.quantize_as(model)
        except BaseException:
            opened.close()
            raise
        return opened.stream_and_close()


def _check_listed(model_config: ModelConfig) -> None:
    """Raise ReshardError if a tensor is not as the checkpoint's manifest has it; each rank reads a part of them."""
    size, rank = tensor_parallel()
    directory = directory_of(model_config)
    megatron, beside = megatron_directory(directory), model_config.hf_config_path
    is_beside = megatron is not None and beside is not None
    config = config_directory(str(beside), model_config.revision) if is_beside else None
    with closing(open_source(megatron or directory, config)) as source:
        check_listed(source, rank, size)


def _check_same_model(path: Path, model_config: ModelConfig) -> None:
    """Raise ReshardError if a Hugging Face directory is of another model than the engine's, by the
    shapes that their configs give."""
    try:
        stored = any_model(read_config(path / "config.json"), str(path))
        served = any_model(model_config.hf_config.to_dict(), "the engine's config")
    except ReshardError:
        return  # without a config, or an architecture of which nobody knows the tensors
    if stored.family.has_megatron_names != served.family.has_megatron_names:
        return  # the tensors of the two have other names
    stored_shapes, served_shapes = (expand(replace(model, mtp_layers=0)).shapes for model in (stored, served))
    for name in (*stored_shapes, *served_shapes):
        if stored_shapes.get(name) != served_shapes.get(name):
            stored_shape, served_shape = (
                str(list(shapes[name])) if name in shapes else "none"
                for shapes in (stored_shapes, served_shapes)
            )
            raise ReshardError(
                f"{path} is of another model than the engine's: the shape of {name} is {stored_shape}, "
                f"and the engine's {served_shape}"
            )


def _check_complete(opened: OpenedWeights, model_config: ModelConfig) -> None:
    """Raise ReshardError if a checkpoint lacks tensors that the engine's model has by the mapping
    table, or by transformers' class: vLLM's loaders would leave their layers as they are."""
    try:
        model = any_model(model_config.hf_config.to_dict(), "the engine's config")
    except ReshardError as error:
        logger.warning(
            "whether %s has all of the model's tensors is not known: %s", opened.name, first_line(error)
        )
        return
    opened.check_complete(model)


def _check_loaded(model: torch.nn.Module, model_config: ModelConfig, loaded: set[str] | None) -> None:
    """Raise ReshardError if parameters got nothing, given the names of those that vLLM has `loaded`;
    None if the model does not say so.

    Of layers that are quantized, something of each has to be loaded: scales need not be in a
    checkpoint. Scales of the attention's cache need not be either.
    """
    if loaded is None:
        return
    missing = []
    for layer, names in _parameters_by_layer(model).items():
        module = model.get_submodule(layer)
        if type(getattr(module, "quant_method", None)).__name__.endswith(CACHE_METHOD):
            continue
        # vLLM says ``experts.w13_weight`` for ``experts.routed_experts.w13_weight``.
        outer = layer.rpartition(".")[0]
        absent = [name for name in names if not loaded & {name, outer + name.removeprefix(layer)}]
        if not loading_method(module) or len(absent) == len(names):
            missing += absent
    if missing:
        raise ReshardError(f"{model_config.model} has nothing for vLLM's {listed(missing, 3)}")


def _parameters_by_layer(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the names of a model's parameters, tied ones once, by the module that has them."""
    by_layer: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        by_layer.setdefault(name.rpartition(".")[0], []).append(name)
    return by_layer
