"""The LoRA adapter of a live Megatron model as the source of a refit: the modules of Megatron-Bridge or of
mcore-bridge, in whatever layout the trainer has.

The matrices are published under PEFT's names. Where Megatron has one A for several published layers (queries,
keys and values; gate and up), each of them is published, from the same memory.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor
from reshard.device.memory import Region
from reshard.lora.checkpoint import check_supported, find_adapters
from reshard.lora.names import PEFT_PREFIX, peft_name
from reshard.lora.parameters import Adapter, adapter_parameters
from reshard.lora.scale import Scale
from reshard.megatron.gtp import WITHOUT_GTP
from reshard.megatron.hybrid import class_of_models
from reshard.megatron.parameters import Parameter, expand
from reshard.models.model import Model
from reshard.refit.lora.scales import encode_scales
from reshard.trainers.adapter_names import is_of_adapter
from reshard.trainers.lora_scales import WHERE, Alpha, Factors, alpha_of, check_frozen
from reshard.trainers.shards import ShardedModel

# What tells the name of a live module from that in a checkpoint's keys.
_SPELLINGS = (
    (re.compile(r"\.experts\.(?:local_experts\.\d+|experts)\."), ".experts."),
    (re.compile(r"\.mtp_model_layer\."), ".transformer_layer."),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class Matrix(NamedTuple):
    """A matrix that a shard holds: the shard's index, the elements before the matrix, and its columns."""

    shard: int
    before: int
    columns: int


@dataclass(frozen=True)
class Published:
    """The adapter of a `model` in published names: its local tensors, the matrix of each, and the scale of
    each published weight."""

    model: Model
    held: list[LocalTensor]
    matrices: list[Matrix]
    scales: dict[str, Scale]


class MegatronAdapter(ShardedModel):
    """The LoRA adapter of one rank of a trainer, from the modules of Megatron-Bridge (``LoRA``,
    ``CanonicalLoRA``) or mcore-bridge; a rank may have none of its layers.

    Raises ReshardError for an adapter that is more than pairs of matrices (DoRA, ``modules_to_save``),
    and where parameters of the base are trained too.
    """

    def __init__(self, models: Sequence[torch.nn.Module], metadata: Any) -> None:
        super().__init__(models, metadata)
        if self.gtp != WITHOUT_GTP:
            raise ReshardError(
                "the trainer's adapter is in a model under GTP, which is not supported: train it with "
                "--tensor-parallel-num-weight-shards as large as --tensor-model-parallel-size"
            )
        check_supported((shard.key for shard in self.shards), WHERE)
        check_frozen(self.models)
        self._published: Published | None = None
        self._factors = Factors(self.models)

    def _published_key(self, key: str) -> str | None:
        return key if is_of_adapter(key) else None

    @property
    def device(self) -> torch.device | None:
        """The adapter's device; that of the base where this rank has no adapter."""
        return next((parameter.device for model in self.models for parameter in model.parameters()), None)

    @property
    def memory(self) -> list[Region]:
        """A region for each published matrix; several may share memory."""
        shards = super().memory
        matrices = self._published.matrices if self._published is not None else []
        return [self._region(shards[matrix.shard], matrix) for matrix in matrices]

    def _region(self, shard: Region, matrix: Matrix) -> Region:
        """Return the region of a matrix in a shard's: all of it, unless the shard has several experts, whose whole
        matrices lie a pitch apart."""
        *stacked, rows, columns = (1, *self.shards[matrix.shard].sizes)
        if math.prod(stacked) == 1:
            return shard
        before = matrix.before // (rows * columns) * shard.pitch
        return shard._replace(offset=shard.offset + before, pitch=matrix.columns)

    def check_current(self) -> None:
        self._factors.check()

    def name_of(self, index: int) -> str:
        """Return the checkpoint key of a region's matrix."""
        matrices = self._published.matrices if self._published is not None else []
        return self.shards[matrices[index].shard].key

    def check_model(self, model: Model) -> None:
        """Nothing: the connection of the base has compared the models."""

    def as_published(self, model: Model) -> "MegatronAdapter":
        """Return this adapter, whose regions are those of the matrices of `model` from then on."""
        if self._published is None or self._published.model != model:
            self._published = self._publish(model)
        return self

    def publish(self, model: Model) -> list[LocalTensor]:
        self.as_published(model)
        assert self._published is not None
        return self._published.held

    def facts(self) -> bytes:
        """Return the scale of each published weight that has one on this rank."""
        return encode_scales(self.scales())

    def scales(self) -> dict[str, Scale]:
        """Return the scale of each published weight that has one on this rank."""
        return self._published.scales if self._published is not None else {}

    def _publish(self, model: Model) -> Published:
        if self._left_out:
            raise ReshardError(
                f"{WHERE} has {len(self._left_out)} parameters that the model's sharded_state_dict leaves out: "
                f"{listed(self._left_out)}"
            )
        keys = self._keys()
        if not keys:
            return Published(model, [], [], {})
        base = expand(model, model_class=class_of_models(self.texts))
        config: Any = self.config
        adapters, form = find_adapters(keys, WHERE, model, base, config.tensor_model_parallel_size)
        parameters = adapter_parameters(adapters, form)
        copies: dict[str, list[str]] = defaultdict(list)
        for name, primary in parameters.copies.items():
            copies[primary].append(name)
        held: list[LocalTensor] = []
        matrices: list[Matrix] = []
        for shard, before, tensor in self._placed(model, parameters, WHERE):
            matrix = Matrix(shard, before, tensor.shape[-1])
            for same in _with_copies(tensor, copies):
                held.append(same._replace(id=len(held)))
                matrices.append(matrix)
        names = {part.name for tensor in held for part in tensor.parts}
        alphas = _alphas(self.texts)
        scales = {
            weight: _scale(alphas, adapter, rank)
            for adapter in adapters
            for weight, rank in adapter.ranks.items()
            if peft_name(weight, "B") in names
        }
        return Published(model, held, matrices, scales)


def _with_copies(tensor: LocalTensor, copies: dict[str, list[str]]) -> Iterator[LocalTensor]:
    """Yield a local tensor, and it once more for each published tensor that is a copy of its parts'."""
    yield tensor
    most = max((len(copies.get(part.name, ())) for part in tensor.parts), default=0)
    for number in range(most):
        parts = tuple(
            part._replace(name=copies[part.name][number])
            for part in tensor.parts
            if number < len(copies.get(part.name, ()))
        )
        yield tensor._replace(parts=parts)


def _alphas(models: Sequence[torch.nn.Module]) -> dict[str, Alpha]:
    """Return what each adapter module of a rank multiplies by, by the name of the layer in a checkpoint's keys
    with the layer's number."""
    alphas = {}
    for model in models:
        for name, module in model.named_modules():
            alpha = alpha_of(module)
            if alpha is not None:
                alphas[_spelled(model, name.partition(".adapter")[0])] = alpha
    return alphas


def _spelled(model: torch.nn.Module, name: str) -> str:
    """Return a live layer's name with the number of its transformer layer in the whole model, as keys spell
    it."""
    name = name.removeprefix(PEFT_PREFIX)
    match = _LAYER.match(name)
    if match is not None:
        layer: Any = model.get_submodule(match[0].rstrip("."))
        name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    return _as_in_keys(name)


def _as_in_keys(name: str) -> str:
    for pattern, spelling in _SPELLINGS:
        name = pattern.sub(spelling, name)
    return name


def _scale(alphas: dict[str, Alpha], adapter: Adapter, rank: int) -> Scale:
    """Return the scale of an adapter. Raises ReshardError if no module of the model has it."""
    kinds = set(alphas.values())
    if len(kinds) == 1:
        [alpha] = kinds
        return Scale(rank, *alpha)
    p: Parameter = adapter.layer.first
    prefix = f"{p.prefix}{p.layer}." if p.prefix == "decoder.layers." else p.prefix
    name = _as_in_keys(prefix + adapter.layer.module)
    if name not in alphas:
        raise ReshardError(f"{WHERE} has no module that says the alpha of {name}")
    return Scale(rank, *alphas[name])
