"""The weights of a checkpoint, opened for an engine's own loader: published tensors, one after the other, in
fp8 blocks where the config wants them."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.views import tensor_of
from reshard.device.stored import published, stored_tensors
from reshard.engines.layout import published_tensors
from reshard.engines.loading.checkpoint import wants_fp8_blocks
from reshard.engines.tracing.trace import Canonical
from reshard.engines.tracing.views import StoredViews
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.quantization.fp8_blocks import SCALE_SUFFIX, encode
from reshard.quantization.scheme import check_finite
from reshard.storage.io.reading import Weights
from reshard.storage.sources.megatron import MegatronSource

MAX_THREADS = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_BESIDE_CODES = re.compile(r"(scale|zero|shape|g_idx|qmap|absmax)[^.]*$")
_UNDERSCORE = re.compile(r"_(?=[^.]*$)")  # in the last part of a name


def _unnumbered(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and expert."""
    return _NUMBER.sub("", name)


def _quantized_of(names: Iterable[str]) -> set[str]:
    """Return the weights for which tensors of these names may stand that a model does not have by itself: quantized
    checkpoints have such beside those of scales, as ``weight_packed``, ``qweight`` or ``gate_up_proj_blocks``."""
    coded = [name for name in names if not _BESIDE_CODES.search(name)]
    of_modules = {name.rpartition(".")[0] + ".weight" for name in coded}
    return of_modules | {name[: at.start()] for name in coded for at in _UNDERSCORE.finditer(name)}


class StoredWeights:
    """The weights of a checkpoint, called `name` in logs. `quantized` are the names of those that the config
    wants as fp8 blocks: they are quantized while they are read. `taken` are the names of those that this rank
    takes a part of, and reads; None for all."""

    def __init__(self, name: str, weights: Weights, quantized: frozenset[str] = frozenset()) -> None:
        self.name, self.weights, self.quantized = name, weights, quantized
        self.taken: frozenset[str] | None = None

    def views(self) -> StoredViews:
        """Return how the weights lie in the tensors that an engine's loader takes."""
        shapes = {name: info.shape for name, info in self.weights.tensors.items()}
        return StoredViews(shapes, self.weights.packed)

    def stored(self, views: StoredViews) -> Canonical:
        """Return shapes and dtypes of the tensors that an engine's loader takes, for a trace."""
        tensors = self.weights.tensors.items()
        return views.with_dtypes({name: getattr(torch, info.dtype.name) for name, info in tensors})

    def check_complete(self, model: Model) -> None:
        """Raise ReshardError if tensors are missing that a model has by the mapping table, or by transformers' class:
        engines' loaders would leave their layers, or parts of what they join, as they are.

        Where a checkpoint has tensors that the class does not know, only those are by the class of which other layers
        or experts have the like: engines' loaders know other names of whole checkpoints than the installed
        transformers saves.
        """
        stored, packed = self.weights.tensors, expand(model).packed
        rows = [(row, name, tensor_of(packed.get(name, name))) for row, name in published_tensors(model)]
        known = {name for _, *names in rows for name in names}
        others = stored.keys() - known
        there = stored.keys() | _quantized_of(others)
        lacking = [name for row, name, tensor in rows if not row.optional and not {name, tensor} & there]
        if not model.family.has_megatron_names and others:
            like = {_unnumbered(name) for name in there}
            lacking = [name for name in lacking if _unnumbered(name) in like]
        if lacking:
            raise ReshardError(f"{self.name} lacks {len(lacking)} of the model's tensors: {listed(lacking)}")

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (published name, full tensor), one after the other."""
        shapes = {name: info.shape for name, info in self.weights.tensors.items()}
        return stored_tensors(self._stream(), shapes, self.weights.packed)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        regions = (self.weights.whole(name) for name in self._names())
        for region, raw in self.weights.read_ahead(regions, host_memory, threads()):
            yield from self._for_loader(region.name, raw)

    def _names(self) -> list[str]:
        """Return the names of the tensors to read, in order."""
        return [name for name in self.weights.tensors if self.taken is None or name in self.taken]

    def _for_loader(self, name: str, raw: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what an engine's loader takes in the place of a tensor, given its bytes."""
        info = self.weights.tensors[name]
        if name in self.quantized:
            codes, scales = encode(raw.view(info.dtype.numpy()))
            check_finite(name, scales)
            yield name, torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
            yield name + SCALE_SUFFIX, torch.from_numpy(scales)
        else:
            tensor = tensor_from_bytes(raw, info.dtype.name).reshape(info.shape)
            yield name, published(tensor, info.dtype)

    def stream_and_close(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same, and close the files at the end."""
        with closing(self), self.weights.unchanged():
            yield from self.stream()

    def close(self) -> None:
        self.weights.close()


def names_in_blocks(source: MegatronSource, wanted: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of weights that an engine expects as fp8 blocks with scales, by the `wanted`
    quantization in its config."""
    if not wants_fp8_blocks({"quantization_config": wanted}, source.path):
        return frozenset()
    recorded = (source.manifest() or {}).get("quantized")
    names = recorded or source.model.quantizable() & source.tensors.keys()
    excepted = wanted.get("ignored_layers") or wanted.get("modules_to_not_convert") or []
    return frozenset(name for name in names if name.removesuffix(".weight") not in excepted)


def tensor_from_bytes(raw: np.ndarray, dtype: str) -> torch.Tensor:
    """Return bytes ``[rows, columns * size]`` as a tensor ``[rows, columns]``, in the same
    memory."""
    return torch.from_numpy(raw).view(getattr(torch, dtype))


def host_memory(size: int) -> np.ndarray:
    return torch.empty(size, dtype=torch.uint8, device="cpu").numpy()


def threads() -> int:
    """Return how many threads a rank reads with: a fair part of the cores of its host."""
    # An engine's config would say it too, but one that runs and reloads has none set.
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return max(1, min(MAX_THREADS, (os.cpu_count() or 1) // ranks))
