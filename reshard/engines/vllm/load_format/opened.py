"""The weights of a checkpoint, opened for vLLM's loader: quantized, while they are read, as the config
wants them."""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard.core.extras import importing

with importing("vllm"):
    import torch
    from vllm.config import ModelConfig

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype, dtype_named
from reshard.core.errors import ReshardError
from reshard.engines.loading.checkpoint import config_directory, megatron_directory
from reshard.engines.loading.stored_weights import StoredWeights, names_in_blocks, tensor_from_bytes
from reshard.engines.tracing.trace import Canonical
from reshard.engines.vllm.quantized import nvfp4
from reshard.engines.vllm.quantized.compressed import stored_as
from reshard.engines.vllm.quantized.layers import NVFP4, Compressed, compressed_of, method_of
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import loading_method
from reshard.quantization import channels, compressed_tensors, modelopt
from reshard.quantization.fp8_blocks import SCALE_SUFFIX
from reshard.quantization.nvfp4 import fused
from reshard.quantization.nvfp4_torch import encode as encode_nvfp4
from reshard.quantization.scheme import check_finite
from reshard.storage.io.reading import Weights, weights_of_huggingface, weights_of_megatron
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import check_huggingface

logger = logging.getLogger("vllm.reshard")  # below vLLM's own, which shows it


class OpenedWeights(StoredWeights):
    """The weights of a checkpoint, called `name` in logs, which are quantized as the config wants
    while they are read.

    `quantized` are the names of those that it wants as fp8 blocks. If `compressed`, it wants some
    as compressed-tensors or ModelOpt makes them of weights in `dtype`.
    """

    def __init__(
        self,
        name: str,
        weights: Weights,
        quantized: frozenset[str] = frozenset(),
        compressed: bool = False,
        dtype: Dtype = DTYPES["bfloat16"],
    ) -> None:
        super().__init__(name, weights, quantized)
        self.compressed, self.dtype = compressed, dtype
        self.schemes: dict[str, Compressed] = {}
        self.device = torch.device("cpu")
        self._together: dict[str, torch.Tensor] = {}  # read, of those that share a scale

    def quantize_as(self, model: torch.nn.Module) -> None:
        """Find which weights this model wants quantized, and how.

        Also those that published checkpoints keep in bf16 and this model does not: vLLM would cast
        a router's plain weights into its fp8. Raises ReshardError if a layer wants what cannot be
        made.
        """
        device = next(model.parameters()).device
        self.device = self.device if device.type == "meta" else device  # while vLLM loads anew
        views = self.views()
        if views.views and (self.compressed or self.quantized):
            raise ReshardError(
                f"{self.name}: {min(views.views)} is several of Megatron's parameters, which --load-format "
                "reshard does not quantize together: convert it with reshard mcore-to-hf, and serve that"
            )
        if self.compressed:
            self.schemes, self.taken = _schemes(model, self.stored(views))
        if self.quantized:
            held = {name for name, _ in model.named_parameters()}
            self.quantized |= {name for name in self.weights.tensors if name + SCALE_SUFFIX in held}

    def _names(self) -> list[str]:
        # What other ranks have, such as their experts, would stay plain, and packed layers have no
        # place for plain weights.
        names = super()._names()
        if self.schemes:
            # Weights that share a scale come together. Else the order is that of files in vLLM's
            # own loading, where the last one of several equal parameters counts, such as the shapes
            # of packed weights that vLLM fuses.
            names.sort(key=lambda name: (fused(name)[0] if self._in_nvfp4(name) else name, name))
        self._together = {}
        return names

    def _for_loader(self, name: str, raw: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = self.weights.tensors[name].dtype.name
        if name in self.quantized or name not in self.schemes:
            yield from super()._for_loader(name, raw)
        elif self._in_nvfp4(name):
            self._together[name] = self._on_device(tensor_from_bytes(raw, dtype))
            if len(self._together) == sum(map(self._in_nvfp4, fused(name))):
                yield from self._nvfp4(self._together)
                self._together = {}
        else:
            yield from self._compressed(name, tensor_from_bytes(raw, dtype))

    def _on_device(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device, getattr(torch, self.dtype.name))

    def _in_nvfp4(self, name: str) -> bool:
        return name in self.schemes and self.schemes[name].codes == NVFP4

    def _nvfp4(self, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a checkpoint in nvfp4 has for weights that share a scale."""
        for name, weight in weights.items():
            # Infinities and NaN would not show in such scales.
            check_finite(name, weight.abs().max().float().cpu().numpy())
        largest = torch.stack([weight.abs().max() for weight in weights.values()]).max().view(1)
        for name, weight in weights.items():
            try:
                made = encode_nvfp4(weight, largest, nvfp4.scaling_of_layer(self.schemes[name]))
            except ReshardError as error:
                raise ReshardError(f"{name} cannot be quantized ({error})") from error
            for end, tensor in made.items():
                yield name + end, tensor

    def _compressed(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a checkpoint by compressed-tensors has for a weight, on the
        model's device."""
        made = stored_as(self._on_device(weight), self.schemes[name])
        check_finite(name, made[channels.SCALE_SUFFIX].float().cpu().numpy())
        for end, tensor in made.items():
            yield name + end, tensor


def open_weights(model_config: ModelConfig) -> OpenedWeights:
    """Open the weights that a config names. Raises ReshardError if there are none."""
    path = directory_of(model_config)
    megatron = megatron_directory(path)
    if megatron is None:
        check_huggingface(path)
        return OpenedWeights(str(path), weights_of_huggingface(path))
    config = model_config.hf_config_path
    source = MegatronSource(
        megatron, None if config is None else config_directory(config, model_config.revision)
    )
    for notice in source.notices:
        logger.info("%s: %s", megatron, notice)
    try:
        wanted = getattr(model_config.hf_config, "quantization_config", None) or {}
        return OpenedWeights(
            str(megatron),
            weights_of_megatron(source),
            names_in_blocks(source, wanted),
            wanted.get("quant_method") in (compressed_tensors.METHOD, modelopt.METHOD),
            dtype_named(str(model_config.dtype)),
        )
    except BaseException:
        source.close()
        raise


def directory_of(model_config: ModelConfig) -> Path:
    name, revision = model_config.model, model_config.revision
    return local_directory(name if revision is None or os.path.isdir(name) else f"{name}@{revision}")


def _schemes(model: torch.nn.Module, canonical: Canonical) -> tuple[dict[str, Compressed], frozenset[str]]:
    """Return how each published weight is quantized that a model loads as codes and scales, and the
    names of all that it loads.

    Found by where vLLM's own loader would copy them. Raises ReshardError for a layer that wants
    what cannot be made of plain weights.
    """
    by_parameter: dict[str, Compressed] = {}
    for name, module in model.named_modules():
        how = compressed_of(module)
        if how is None and loading_method(module):
            raise ReshardError(
                f"{name} is loaded by {method_of(module)}, for which reshard cannot quantize Megatron's "
                f"weights"
            )
        if how is not None:
            by_parameter |= {f"{name}.{weight}": how for weight in how.weights}
            if how.codes == NVFP4:
                nvfp4.check_columns(name, module)
    copies = trace_model(model, canonical).copies
    schemes = {copy.name: by_parameter[copy.parameter] for copy in copies if copy.parameter in by_parameter}
    return schemes, frozenset(copy.name for copy in copies)
