"""A live transformers model under FSDP2 (``fully_shard``), also with tensor parallelism, as the source of a
refit.

Every parameter is a DTensor, which says itself which box of the whole it has here
(``compute_local_shape_and_global_offset``); nothing is gathered. Parameters have their published names, but
for those of `Family.in_memory`, and for experts: transformers 5 keeps those of a layer in one tensor,
``experts.gate_up_proj [experts, 2 * F, H]`` and ``experts.down_proj [experts, H, F]``.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, as_matrix
from reshard.core.views import tensor_shapes, view_parts, views_by_tensor
from reshard.device.memory import Region
from reshard.lora.checkpoint import WRAPPED, check_supported
from reshard.lora.names import PEFT_PREFIX, A, parse_key, peft_name
from reshard.lora.scale import Scale
from reshard.megatron.checkpoint import ADAPTER
from reshard.megatron.parameters import expand
from reshard.models.model import Model, different_fields
from reshard.models.published import published
from reshard.trainers.base import Trainer
from reshard.trainers.scales import WHERE, Factors, alpha_of, check_frozen, without_adapter_error

# What wrappers put into a parameter's name: activation checkpointing, torch.compile.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# Experts of a layer in one tensor, and the published names of the rows of one expert, from top to bottom.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class LocalParameter(NamedTuple):
    """A parameter or buffer: where it stands in the model, and the box of the whole that this rank has."""

    name: str
    module: torch.nn.Module
    key: str
    shape: tuple[int, ...]
    box: Box

    @property
    def of_experts(self) -> bool:
        """True for experts in one tensor."""
        return len(self.shape) == 3 and self.name.rpartition(".")[2] in FUSED

    @property
    def matrices(self) -> int:
        """The number of its local tensors: of experts in one tensor, one for each."""
        return self.box.lengths[0] if self.of_experts else 1

    @property
    def tensor(self) -> torch.Tensor:
        """The local tensor, as it is now: FSDP makes a new one when the model is moved."""
        tensor: torch.Tensor | None = self.module._parameters.get(self.key)
        if tensor is None:
            tensor = self.module._buffers[self.key]
        assert tensor is not None
        with torch.no_grad():  # the local tensor itself, without a node of the graph for every look
            return _local(tensor)


class FsdpModel(Trainer):
    """The weights of one rank of a transformers model under ``fully_shard``.

    Parameters that are no DTensors are whole on every rank. Make it, and refit, between two training steps,
    when FSDP has its parameters sharded.

    Raises ReshardError, naming the parameter, for what is not a box of the whole: partial sums, quantized
    tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "to_dict"):
            raise ReshardError(f"{type(model).__name__} is no transformers model: it has no config")
        self.config = config
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        self.model, self.without = model, False  # True: the adapter is another connection's
        named = [held._replace(name=_without_peft(held.name)) for held in _local_parameters(model)]
        self.adapter_names = {held.name for held in named if ADAPTER.search(held.name)}
        self.held = [held for held in named if all(held.box.lengths) and self._publishes(held.name)]
        self._names = [held.name for held in self.held for _ in range(held.matrices)]

    def _publishes(self, name: str) -> bool:
        """Return True for a parameter that this source publishes: any but an adapter's."""
        return name not in self.adapter_names

    def adapter(self) -> "FsdpAdapter":
        """See `Trainer.adapter`: that of PEFT's modules."""
        self.without = True
        return FsdpAdapter(self.model)

    def _reshard(self) -> None:
        """Shard all parameters: some modules, by default the outermost, keep them whole after a forward."""
        for module in self._sharded:
            module.reshard()

    @property
    def regions(self) -> list[Region]:
        """See `Trainer.regions`: one for each local tensor, of experts in one tensor one for each expert.

        Made anew from what FSDP holds now: it makes new local tensors when the model is moved, and one that
        is kept here would keep its memory from being freed.
        """
        self._reshard()
        regions = []
        for held, tensor in zip(self.held, self._tensors(), strict=True):
            elements = tensor.numel() // held.matrices
            # Of experts the last dim, else all dims after the first.
            pitch = math.prod(tensor.shape[2 if held.of_experts else 1 :])
            regions += [Region(tensor, index * elements, pitch) for index in range(held.matrices)]
        return regions

    def _tensors(self) -> list[torch.Tensor]:
        """Return the local tensors, as they are now. Raises ReshardError where one is not as it was
        at connect."""
        tensors = [held.tensor for held in self.held]
        for held, tensor in zip(self.held, tensors, strict=True):
            if tensor.shape != held.box.lengths:
                raise ReshardError(
                    f"the trainer's {held.name} is not sharded as it was at connect: refit "
                    f"between two training steps"
                )
            if not tensor.is_contiguous():
                raise ReshardError(
                    f"the trainer's {held.name} has strides {list(tensor.stride())}: its "
                    f"rows are not contiguous"
                )
        return tensors

    @property
    def device(self) -> torch.device | None:
        """See `Trainer.device`: by the mesh, since FSDP may keep parameters in host memory."""
        for held in self.held:
            parameter = held.module._parameters.get(held.key)
            if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
        return super().device

    def name_of(self, index: int) -> str:
        """Return the parameter's name in the model."""
        return self._names[index]

    def addresses(self) -> list[int]:
        """See `Trainer.addresses`."""
        self._reshard()
        return [tensor.data_ptr() for tensor in self._tensors()]

    def check_memory(self, device: torch.device) -> None:
        """See `Trainer.check_memory`; shards that FSDP keeps in host memory are named."""
        for held in self.held:
            parameter = held.module._parameters.get(held.key)
            offloaded = (
                isinstance(parameter, DTensor)
                and parameter.device_mesh.device_type != "cpu" == held.tensor.device.type
            )
            if offloaded:
                where = f"is on {held.tensor.device} (CPUOffloadPolicy)"
                raise ReshardError(
                    f"the trainer's {held.name} {where}, and a refit reads from a GPU: move "
                    f"the whole model there first"
                )
        super().check_memory(device)

    def check_model(self, model: Model) -> None:
        """See `Trainer.check_model`: by transformers' config of the model."""
        own = Model.from_hf(published(self.config.to_dict(), "the trainer's config"), "the trainer's config")
        for name, (ours, theirs) in different_fields(own, model).items():
            raise ReshardError(
                f"the trainer's {name} is {ours}, but the served model's is {theirs} ({model.where})"
            )

    def publish(self, model: Model) -> list[LocalTensor]:
        """See `Trainer.publish`."""
        if self.adapter_names and not self.without:
            raise without_adapter_error("the trainer's model", self.adapter_names)
        if not model.family.experts_apart:
            raise ReshardError(
                f"{model.where}: transformers holds the experts of a {model.family.architecture} transposed, and a refit "
                f"copies rows: train it with Megatron, or publish it with save_pretrained"
            )
        shapes, published_names = expand(model).shapes, model.names_in_memory()
        views = views_by_tensor(shapes)
        tensors = [local for held in self.held for local in _locals(held, shapes, views, published_names)]
        unknown = sorted({self._names[index] for index, local in enumerate(tensors) if local is None})
        if unknown:
            raise ReshardError(
                f"the trainer's model holds {len(unknown)} parameters that {model.family.name} does not "
                f"have: {listed(unknown)}"
            )
        return [local._replace(id=index) for index, local in enumerate(tensors) if local is not None]


class FsdpAdapter(FsdpModel):
    """The LoRA adapter of one rank of a transformers model that PEFT has put it on, under ``fully_shard`` or
    not.

    Raises ReshardError for an adapter that is more than pairs of matrices, for adapters of all experts in one
    tensor, and where parameters of the base are trained too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        check_supported(self.adapter_names, WHERE)
        check_frozen([model])
        self._factors = Factors([model])
        self._scales: dict[str, Scale] = {}

    def _publishes(self, name: str) -> bool:
        return name in self.adapter_names

    @property
    def device(self) -> torch.device | None:
        """See `Trainer.device`; that of the base where this rank has no part of the adapter."""
        return super().device or next((p.device for p in self.model.parameters()), None)

    def addresses(self) -> list[int]:
        """See `Trainer.addresses`; called before every refit, so that a scale that has changed is seen."""
        self._factors.check()
        return super().addresses()

    def check_model(self, model: Model) -> None:
        """Nothing: the connection of the base has compared the models."""

    def scales(self) -> dict[str, Scale]:
        """See `Trainer.scales`."""
        return self._scales

    def publish(self, model: Model) -> list[LocalTensor]:
        """See `Trainer.publish`."""
        shapes, published_names = expand(model).shapes, model.names_in_memory()
        alphas = {
            _without_peft(name): alpha
            for name, module in self.model.named_modules()
            if (alpha := alpha_of(module)) is not None
        }
        tensors, unknown = [], []
        for index, held in enumerate(self.held):
            module, matrix = _matrix_of(held.name)
            weight = published_names.get(f"{module}.weight", f"{module}.weight")
            shape = shapes.get(weight, ())
            rank, *size = held.shape if matrix == A else held.shape[::-1]
            if len(shape) != 2 or not matrix or size != [shape[matrix == A]]:
                unknown.append(held.name)
                continue
            self._scales[weight] = Scale(rank, *alphas[module])
            part = Part(peft_name(weight, matrix), held.box, (0, 0))
            tensors.append(LocalTensor(index, held.box.lengths, (part,)))
        if unknown:
            raise ReshardError(
                f"{WHERE} holds {len(unknown)} matrices of no linear layer that {model.family.name} has by itself: "
                f"{listed(unknown)}"
            )
        return tensors


def _without_peft(name: str) -> str:
    """Return a parameter's or module's name without what PEFT puts into that of a layer below an adapter."""
    return WRAPPED.sub(".", name.removeprefix(PEFT_PREFIX))


def _matrix_of(name: str) -> tuple[str, str]:
    """Return the module and the matrix of a parameter of an adapter; no matrix where it is none."""
    key = parse_key(name)
    return (key.module, key.matrix) if key is not None and not key.part else (name, "")


def _local_parameters(model: torch.nn.Module) -> Iterator[LocalParameter]:
    """Yield every parameter and persistent buffer once, with the box that this rank has."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        persistent = {
            key: t for key, t in module._buffers.items() if key not in module._non_persistent_buffers_set
        }
        for key, tensor in {**module._parameters, **persistent}.items():
            if tensor is None or id(tensor) in seen:
                continue  # tied embeddings have two names
            seen.add(id(tensor))
            name = f"{path}.{key}" if path else key
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            if type(_local(tensor.detach())) is not torch.Tensor or tensor.dtype.itemsize < 2:
                raise ReshardError(
                    f"the trainer's {name} is quantized, and quantized parameters cannot be refitted from"
                )
            yield LocalParameter(name, module, key, tuple(tensor.shape), _box(name, tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _box(name: str, tensor: torch.Tensor) -> Box:
    """Return the box of the whole that this rank has."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise ReshardError(
            f"the trainer's {name} is a sum of which this rank has a term "
            f"({list(tensor.placements)}), and no part of it"
        )
    lengths, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple(offsets), tuple(lengths))


def _locals(
    held: LocalParameter,
    shapes: Mapping[str, tuple[int, ...]],
    views: Mapping[str, list[str]],
    published_names: Mapping[str, str],
) -> list[LocalTensor | None]:
    """Return the local tensors of a parameter, one for each of its regions; None where the model
    has no such tensor.

    Raises ReshardError where it has another shape.
    """
    name = published_names.get(held.name, held.name)
    if name in views:
        stored = tensor_shapes({view: shapes[view] for view in views[name]})[name]
        _check_shape(held, stored)
        matrix = _rows(held)
        return [LocalTensor(0, matrix.lengths, tuple(view_parts(views[name], stored, matrix)))]
    if not held.of_experts:
        if name not in shapes:
            return [None]
        _check_shape(held, shapes[name])
        zero = (0,) * len(held.shape)
        return [LocalTensor(0, held.box.lengths, (Part(name, held.box, zero),))]
    (first, row, column), (experts, rows, columns) = held.box
    prefix, _, fused = held.name.rpartition(".")
    tensors: list[LocalTensor | None] = []
    for expert in range(first, first + experts):
        names = [f"{prefix}.{expert}.{part}.weight" for part in FUSED[fused]]
        names = [published_names.get(name, name) for name in names]
        if names[0] not in shapes:
            tensors.append(None)
            continue
        height, width = shapes[names[0]]
        _check_shape(held, (held.shape[0], height * len(names), width))
        local_box, parts = Box((row, column), (rows, columns)), []
        for index, name in enumerate(names):
            common = Box((index * height, 0), (height, width)).intersect(local_box)
            if common is not None:
                box = Box(common.relative_to((index * height, 0)), common.lengths)
                parts.append(Part(name, box, common.relative_to(local_box.offsets)))
        tensors.append(LocalTensor(0, (rows, columns), tuple(parts)))
    return tensors


def _rows(held: LocalParameter) -> Box:
    """Return the box of a parameter as one of a matrix. Raises ReshardError where it is split along
    a dim after the second."""
    offsets, lengths = held.box
    if len(lengths) > 2 and lengths[1:] != held.shape[1:]:
        raise ReshardError(f"the trainer's {held.name} is split along another dim than the first")
    return held.box if len(lengths) == 2 else Box((offsets[0], 0), as_matrix(lengths))


def _check_shape(held: LocalParameter, shape: tuple[int, ...]) -> None:
    if held.shape != shape:
        raise ReshardError(f"the trainer's {held.name} has shape {list(held.shape)}, expected {list(shape)}")
