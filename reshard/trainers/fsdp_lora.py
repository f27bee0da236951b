"""The LoRA adapter of a live transformers model that PEFT has put it on, as the source of a refit.

transformers 5 keeps the experts of a layer in one parameter, and PEFT an adapter for that
(``target_parameters``): A ``[experts * rank, in]``, expert by expert, and B ``[out, rank * experts]`` with the
experts of one rank side by side. Each expert's own matrices are published; those of B are read from a copy
``[experts, out, rank]``, which is made before each refit.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part
from reshard.device.memory import Region
from reshard.lora.checkpoint import check_supported
from reshard.lora.names import A, B, parse_key, peft_name
from reshard.lora.scale import Scale
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.models.without_table import ClassFamily
from reshard.refit.lora.scales import encode_scales
from reshard.trainers.fsdp_shards import (
    FUSED,
    FsdpShards,
    LocalParameter,
    check_is_transformers,
    without_peft,
)
from reshard.trainers.lora_scales import WHERE, Alpha, Factors, alpha_of, check_frozen


class ExpertMatrices(NamedTuple):
    """A matrix, ``A`` or ``B``, that PEFT has for all experts of a layer: their `module`, the `parameter` in it
    that it is of, and the number of `experts`."""

    module: str
    parameter: str
    experts: int
    matrix: str
    alpha: Alpha


class PlacedMatrix(NamedTuple):
    """A published matrix: the parameter that it is in, by its index, its first element and its pitch there,
    and what it is."""

    held: int
    offset: int
    pitch: int
    tensor: LocalTensor


class FsdpAdapter(FsdpShards):
    """The LoRA adapter of one rank of a transformers model that PEFT has put it on, under ``fully_shard`` or
    not.

    Raises ReshardError for an adapter that is more than pairs of matrices, and where parameters of the base
    are trained too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        check_is_transformers(model)
        super().__init__(model)
        check_supported(self.adapter_names, WHERE)
        check_frozen([model])
        self._factors = Factors([model])
        self._scales: dict[str, Scale] = {}
        self._of_experts = _matrices_of_experts(model)
        self._copies: dict[int, torch.Tensor] = {}  # of B of all experts, by the parameter's index
        self._model: Model | None = None
        self._placed: list[PlacedMatrix] = []

    def _publishes(self, name: str) -> bool:
        return name in self.adapter_names

    @property
    def device(self) -> torch.device | None:
        """The adapter's device; that of the base where this rank has no part of the adapter."""
        return super().device or next((p.device for p in self.model.parameters()), None)

    @property
    def memory(self) -> list[Region]:
        """A region for each published matrix; several may share memory."""
        self._reshard()
        memory = self._memory(self._tensors())
        return [Region(memory[placed.held], placed.offset, placed.pitch) for placed in self._placed]

    def _memory(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return where the matrices of each parameter are read, given the local tensors."""
        return [self._copies.get(index, tensor) for index, tensor in enumerate(tensors)]

    def name_of(self, index: int) -> str:
        """Return the parameter's name in the model."""
        return self.held[self._placed[index].held].name

    def check_current(self) -> None:
        self._factors.check()

    def addresses(self) -> list[int]:
        """Return the addresses now. Called before every refit, so that copies are of what is trained now."""
        self._reshard()
        tensors = self._tensors()
        self._copy(tensors)
        return [tensor.data_ptr() for tensor in self._memory(tensors)]

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        """Copy every B of all experts, expert by expert, from the local tensors."""
        for index, (held, tensor) in enumerate(zip(self.held, tensors, strict=True)):
            of_experts = self._of_experts.get(id(held.module))
            if of_experts is not None and of_experts.matrix == B:
                by_expert = tensor.detach().view(len(tensor), -1, of_experts.experts).permute(2, 0, 1)
                copy = self._copies.get(index)
                if copy is None or copy.device != tensor.device:
                    self._copies[index] = by_expert.contiguous()
                else:
                    copy.copy_(by_expert)

    def check_model(self, model: Model) -> None:
        """Nothing: the connection of the base has compared the models."""

    def facts(self) -> bytes:
        """Return the scale of each published weight that has one on this rank."""
        return encode_scales(self.scales())

    def scales(self) -> dict[str, Scale]:
        """Return the scale of each published weight that has one on this rank."""
        return self._scales

    def as_published(self, model: Model) -> "FsdpAdapter":
        """Return this adapter, whose regions are those of the matrices of `model` from then on."""
        if self._model != model:
            self._copy(self._tensors())
            self._scales = {}
            self._placed = [
                placed._replace(tensor=placed.tensor._replace(id=index))
                for index, placed in enumerate(self._place(model))
            ]
            self._model = model
        return self

    def publish(self, model: Model) -> list[LocalTensor]:
        return [placed.tensor for placed in self.as_published(model)._placed]

    def _place(self, model: Model) -> list[PlacedMatrix]:
        shapes, published_names = expand(model).shapes, model.names_in_memory()
        if isinstance(model.family, ClassFamily):
            shapes = {name: shapes[name] for name in model.family.taking_adapters}
        alphas = {
            without_peft(name): alpha
            for name, module in self.model.named_modules()
            if (alpha := alpha_of(module)) is not None
        }
        placed: list[PlacedMatrix] = []
        unknown = []
        for index, held in enumerate(self.held):
            of_experts = self._of_experts.get(id(held.module))
            if of_experts is not None:
                matrices = list(self._expert_matrices(index, held, of_experts, published_names))
                fit = all(
                    _fits(shapes.get(weight, ()), matrix.tensor, of_experts.matrix)
                    for weight, matrix in matrices
                )
                placed += [matrix for _, matrix in matrices]
                unknown += [] if fit else [held.name]
                continue
            module, matrix = _matrix_of(held.name)
            weight = published_names.get(f"{module}.weight", f"{module}.weight")
            shape = shapes.get(weight, ())
            rank, *size = held.shape if matrix == A else held.shape[::-1]
            if len(shape) != 2 or not matrix or size != [shape[matrix == A]]:
                unknown.append(held.name)
                continue
            self._scales[weight] = Scale(rank, *alphas[module])
            part = Part(peft_name(weight, matrix), held.box, (0, 0))
            placed.append(
                PlacedMatrix(index, 0, held.box.lengths[1], LocalTensor(0, held.box.lengths, (part,)))
            )
        if unknown:
            raise ReshardError(
                f"{WHERE} holds {len(unknown)} matrices of no linear layer that {model.family.name} has by itself: "
                f"{listed(unknown)}"
            )
        return placed

    def _expert_matrices(
        self, index: int, held: LocalParameter, of: ExpertMatrices, published_names: Any
    ) -> Iterator[tuple[str, PlacedMatrix]]:
        """Yield each expert's matrices in a parameter that has those of all, with the weights that they are of,
        and note the scales of these."""
        parts, (first, _), (rows, columns) = FUSED[of.parameter], *held.box
        whole_rows, whole_columns = held.shape
        rank = (whole_rows if of.matrix == A else whole_columns) // of.experts
        height = whole_rows // len(parts)  # of B, of one of the fused weights
        for expert in range(of.experts):
            names = [f"{of.module}.{expert}.{part}.weight" for part in parts]
            for number, name in enumerate(names):
                weight = published_names.get(name, name)
                self._scales[weight] = Scale(rank, *of.alpha)
                start, length = (expert * rank, rank) if of.matrix == A else (number * height, height)
                begin, end = max(first, start), min(first + rows, start + length)
                if begin >= end:
                    continue
                width = columns if of.matrix == A else rank
                box = Box((begin - start, 0), (end - begin, width))
                before = (begin - first) * width
                if of.matrix == B:
                    before += expert * rows * rank
                part = Part(peft_name(weight, of.matrix), box, (0, 0))
                yield weight, PlacedMatrix(index, before, width, LocalTensor(0, box.lengths, (part,)))


def _fits(shape: tuple[int, ...], tensor: LocalTensor, matrix: str) -> bool:
    """Return True if a weight of a model has a shape that an expert's matrix goes with."""
    [part] = tensor.parts
    ends = part.box.ends
    return len(shape) == 2 and (ends[1] == shape[1] if matrix == A else ends[0] <= shape[0])


def _matrices_of_experts(model: torch.nn.Module) -> dict[int, ExpertMatrices]:
    """Return what the matrices are that PEFT has for all experts of a layer, by the identities of the linear
    modules in which they are."""
    matrices = {}
    for name, module in model.named_modules():
        parameter: Any = getattr(module, "parameter_name", None)
        alpha = alpha_of(module)
        if alpha is None or parameter not in FUSED:
            continue
        wrapper: Any = module
        path = without_peft(f"{name}.")[:-1]
        for matrix, linears in ((A, wrapper.lora_A), (B, wrapper.lora_B)):
            for linear in linears.values():
                matrices[id(linear)] = ExpertMatrices(path, parameter, wrapper.num_experts, matrix, alpha)
    return matrices


def _matrix_of(name: str) -> tuple[str, str]:
    """Return the module and the matrix of a parameter of an adapter; no matrix if it is not one."""
    key = parse_key(name)
    return (key.module, key.matrix) if key is not None and not key.part else (name, "")
