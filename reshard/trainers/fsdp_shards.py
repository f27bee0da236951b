"""The parameters of a live transformers model under FSDP2 (``fully_shard``), and each rank's boxes of
them."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.device.memory import Region
from reshard.refit.trainer import Trainer
from reshard.trainers.adapter_names import is_of_adapter, without_peft

# What wrappers put into a parameter's name: activation checkpointing, torch.compile.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# Experts of a layer in one tensor, and the published names of the rows of one expert, from top to bottom.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


# What batch norms count, each rank of its own batches: one rank's are published, as `save_pretrained` writes them.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class LocalParameter(NamedTuple):
    """A parameter or buffer: where it stands in the model, and the box of the whole that this rank has."""

    name: str
    module: torch.nn.Module
    key: str
    shape: tuple[int, ...]
    box: Box
    of_experts: bool = False  # of which each is published on its own

    @property
    def is_of_batches(self) -> bool:
        """Whether it is a buffer that a batch norm makes of the batches that this rank has seen."""
        return self.key in STATISTICS and self.key in self.module._buffers

    @property
    def matrices(self) -> int:
        """The number of its local tensors: of experts in one tensor, one for each."""
        return self.box.lengths[0] if self.of_experts else 1

    @property
    def tensor(self) -> torch.Tensor:
        """The local tensor, as it is now: FSDP makes a new one when the model is moved. Looked at without
        gradients, so that it is the tensor itself, without a node of the graph for every look."""
        tensor: torch.Tensor | None = self.module._parameters.get(self.key)
        if tensor is None:
            tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor if type(tensor) is torch.nn.Parameter else _local(tensor)


class FsdpShards(Trainer):
    """The parameters of one rank of a torch module under ``fully_shard``, each a region of its live memory: those that
    `_publishes` chooses.

    Parameters that are no DTensors are whole on every rank.

    Raises ReshardError, naming the parameter, for what is not a box of the whole: partial sums, quantized
    tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        self.model = model
        named = [held._replace(name=without_peft(held.name)) for held in _local_parameters(model)]
        named = [held._replace(of_experts=self._is_of_experts(held)) for held in named]
        self.adapter_names = {held.name for held in named if is_of_adapter(held.name)}
        self.published = [held for held in named if self._publishes(held.name)]
        first = _is_first_rank(model)
        self.held = [
            held for held in self.published if all(held.box.lengths) and (first or not held.is_of_batches)
        ]
        self._names = [held.name for held in self.held for _ in range(held.matrices)]

    def _publishes(self, name: str) -> bool:
        """Return True for a parameter that this source publishes: any but an adapter's."""
        return name not in self.adapter_names

    def _is_of_experts(self, held: LocalParameter) -> bool:
        """Return True for experts of a layer in one tensor, of which each is published on its own."""
        return len(held.shape) == 3 and held.name.rpartition(".")[2] in FUSED

    def _reshard(self) -> None:
        """Shard all parameters: some modules, by default the outermost, keep them whole after a forward."""
        for module in self._sharded:
            module.reshard()

    @property
    def memory(self) -> list[Region]:
        """A region for each local tensor, of experts in one tensor one for each expert.

        Made anew from what FSDP holds now: it makes new local tensors when the model is moved, and one that
        is kept here would keep its memory from being freed.
        """
        self._reshard()
        regions = []
        for held, tensor in zip(self.held, self._tensors(), strict=True):
            elements = tensor.numel() // held.matrices
            # Of experts the last dim, also of a single one, else all dims after the first; a single row may be meant
            # as a vector.
            is_row = held.shape[:1] == (1,) and not held.of_experts
            pitch = 1 if is_row else math.prod(tensor.shape[2 if held.of_experts else 1 :])
            regions += [Region(tensor, index * elements, pitch) for index in range(held.matrices)]
        return regions

    def _tensors(self) -> list[torch.Tensor]:
        """Return the local tensors, as they are now. Raises ReshardError if one is not as it was
        at connect."""
        with torch.no_grad():
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
        """The device of the mesh, since FSDP may keep parameters in host memory."""
        for held in self.held:
            parameter = held.module._parameters.get(held.key)
            if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
        return super().device

    def name_of(self, index: int) -> str:
        """Return the parameter's name in the model."""
        return self._names[index]

    def addresses(self) -> list[int]:
        self._reshard()
        return [tensor.data_ptr() for tensor in self._tensors()]

    def check_memory(self, device: torch.device) -> None:
        """Raise ReshardError, naming it, if a shard is not in memory that this device reads; FSDP may keep
        shards in host memory."""
        for held, tensor in zip(self.held, self._tensors(), strict=True):
            parameter = held.module._parameters.get(held.key)
            offloaded = (
                isinstance(parameter, DTensor)
                and parameter.device_mesh.device_type != "cpu" == tensor.device.type
            )
            if offloaded:
                where = f"is on {tensor.device} (CPUOffloadPolicy)"
                raise ReshardError(
                    f"the trainer's {held.name} {where}, and a refit reads from a GPU: move "
                    f"the whole model there first"
                )
        super().check_memory(device)


def _is_first_rank(model: torch.nn.Module) -> bool:
    """Return True on the first of the ranks that a model is sharded over, or of all of them if it is not sharded."""
    meshes = [p.device_mesh.mesh for p in model.parameters() if isinstance(p, DTensor)]
    first = min((int(mesh.min()) for mesh in meshes), default=0)
    return not torch.distributed.is_initialized() or first == torch.distributed.get_rank()


def check_is_transformers(model: torch.nn.Module) -> None:
    """Raise ReshardError for a module without a config of transformers, which says what its parameters are."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise ReshardError(f"{type(model).__name__} is not a transformers model: it has no config")


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
            is_coded = tensor.dtype.itemsize < 2 and tensor.dtype is not torch.bool
            if type(_local(tensor.detach())) is not torch.Tensor or is_coded:
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
