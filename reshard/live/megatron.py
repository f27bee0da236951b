"""A live Megatron-Core model as the source of a refit.

The model itself says what it holds: its ``sharded_state_dict`` gives every parameter's checkpoint key, its place in the global
tensor and a view of the live memory, whatever the pipeline layout, the experts' kind or the layers' implementation. Nothing is
copied and no collective runs.
"""

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from reshard.dtypes import dtype_named
from reshard.errors import ReshardError, listed
from reshard.formats.torch_dist import Key, Stored
from reshard.live.memory import Finder, Region
from reshard.megatron import expand, placement_of_keys, vocab_rows
from reshard.model import Model
from reshard.placement import Placement

# Where a checkpoint's chunk would name its file.
IN_MEMORY = Stored("", 0, 0)


class Shard(NamedTuple):
    """One rank's shard of a global tensor, under its checkpoint key; `offsets` and `sizes` count the stacked dims in."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str


class MegatronModel:
    """The weights of one rank of a trainer.

    `models` is what Megatron's ``get_model`` returns: one chunk for each virtual stage, wrapped (DDP, Float16Module) or bare.
    `metadata` is handed to ``sharded_state_dict``; a trainer that keeps its process groups out of ``parallel_state`` passes
    ``{"dp_cp_group": group}``.

    Raises ReshardError for what has no plain memory: quantised parameters, interleaved gate and up rows.
    """

    def __init__(self, models: Sequence[torch.nn.Module] | torch.nn.Module, metadata: Dictionary[str, Any] | None = None) -> None:
        chunks = [models] if isinstance(models, torch.nn.Module) else list(models)
        self.models = [_unwrapped(chunk) for chunk in chunks]
        if not self.models:
            raise ReshardError("the trainer's list of models is empty")
        self.config = self.models[0].config
        if getattr(self.config, "moe_mlp_glu_interleave_size", None):
            raise ReshardError("moe_mlp_glu_interleave_size mixes gate and up rows, which is not supported: unset it")
        self.shards: list[Shard] = []
        self.regions: list[Region] = []
        self.objects: set[str] = set()
        self._read(dict(metadata) if metadata else None)
        self._tensors = list({id(region.tensor): region.tensor for region in self.regions}.values())

    def _read(self, metadata: dict[str, Any] | None) -> None:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

        seen: dict[tuple, int] = {}
        for model in self.models:
            named = [*model.named_parameters(), *model.named_buffers()]
            quantised = [n for n, t in named if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.dtype.itemsize < 2]
            if [n for n in quantised if "_extra_state" not in n]:
                raise ReshardError(f"quantised parameters cannot be refitted from: {listed(quantised, 3)}")
            state = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            apply_factories(state)
            # Not before: asked for its state, a router makes its expert_bias float32 again, which is a new tensor.
            finder = Finder([*model.named_parameters(), *model.named_buffers()])
            for entry in nested_values(state):
                if isinstance(entry, ShardedObject):
                    self.objects.add(entry.key)
                if not isinstance(entry, ShardedTensor):
                    continue
                prepended = entry.prepend_axis_num
                sizes = (*(1,) * prepended, *entry.local_shape)
                shard = Shard(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), sizes, str(entry.dtype))
                if shard[:4] in seen:
                    continue  # a tied output layer, or the embedding that an MTP stage shares
                seen[shard[:4]] = len(self.shards)
                self.shards.append(shard)
                self.regions.append(finder.region(entry.data, entry.key))

    def addresses(self) -> list[int]:
        """Where the parameters are now: one address for each tensor that a shard looks into."""
        return [tensor.data_ptr() for tensor in self._tensors]

    def check_memory(self, device: torch.device) -> None:
        """Raise ReshardError, naming one, where parameters are not in this device's memory: offloaded, or never moved there."""
        for shard, region in zip(self.shards, self.regions, strict=True):
            tensor = region.tensor
            if tensor.device != device or not tensor.data_ptr():
                where = f"is on {tensor.device}" if tensor.device != device else "has no memory"
                raise ReshardError(f"the trainer's {shard.key} {where}, and a refit reads from {device}: move the whole model there first")

    def check_config(self, model: Model) -> None:
        """Raise ReshardError where Megatron's config says something else than the model that is served, with both values."""
        wanted = model.megatron_args()
        skip = {"num_layers", "mtp_num_layers", "normalization", "seq_length", "params_dtype", "moe_grouped_gemm"}
        names = {"layernorm_epsilon", "num_attention_heads", "num_query_groups", "kv_channels", "hidden_size", "ffn_hidden_size"}
        names |= {name for name in wanted if name.startswith(("moe_router_", "qk_", "q_lora", "kv_lora", "v_head"))} | {"num_experts"}
        for name in sorted((names & set(wanted)) - skip):
            theirs = getattr(self.config, "num_moe_experts" if name == "num_experts" else name, wanted[name])
            if name == "kv_channels" and wanted.get("multi_latent_attention"):
                continue
            if name == "num_query_groups" and not wanted.get("group_query_attention"):
                continue
            if theirs is not None and theirs != wanted[name]:
                raise ReshardError(f"the trainer's {name} is {theirs}, but the served model's is {wanted[name]} ({model.where})")


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while not hasattr(model, "sharded_state_dict") or hasattr(model, "module"):
        inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise ReshardError(f"{type(model).__name__} is no Megatron-Core model: it has no sharded_state_dict")
        model = inner
    return model


class Source(NamedTuple):
    """The source side of a refit, all ranks together.

    Local tensors of `placement` have the ids that `placement_of_keys` gives; `holders` say which ranks have each one, as
    (rank, index among its shards) by (key, offsets, sizes).
    """

    placement: Placement
    holders: dict[tuple, list[tuple[int, int]]]
    dtypes: dict[str, str]


def source_of(shards: Dictionary[int, Sequence[Shard]], objects: set[str], model: Model) -> Source:
    """Put the ranks' shards together.

    Raises ReshardError where they are not `model`'s parameters, all of them and nothing else, or ranks do not agree.
    """
    keys: dict[str, Key] = {}
    holders: dict[tuple, list[tuple[int, int]]] = {}
    first: dict[str, int] = {}
    for rank, some in shards.items():
        for index, shard in enumerate(some):
            dtype = dtype_named(shard.dtype)
            key = keys.setdefault(shard.key, Key(dtype, shard.shape))
            other = first.setdefault(shard.key, rank)
            if key.shape != shard.shape or key.dtype != dtype:
                raise ReshardError(
                    f"the trainer's ranks {other} and {rank} do not agree on {shard.key}: "
                    f"{key.dtype.name} {list(key.shape)} and {dtype.name} {list(shard.shape)}"
                )
            holders.setdefault((shard.key, shard.offsets, shard.sizes), []).append((rank, index))
            key.chunks[shard.offsets, shard.sizes] = IN_MEMORY
    where = "the trainer's model"
    if model.mtp_layers and not any(key.startswith("mtp.") for key in keys):
        from dataclasses import replace

        model = replace(model, mtp_layers=0)
    mapping = expand(model, padded_vocab=vocab_rows(keys, where, model))
    placement = placement_of_keys(keys, objects, where, model, mapping).placement
    dtypes = {part.name: keys[tensor.id[0]].dtype.name for tensor in placement.tensors.values() for part in tensor.parts}
    return Source(placement, holders, dtypes)
