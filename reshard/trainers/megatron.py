"""A live Megatron-Core model as the source of a refit.

The model itself says what it holds: its ``sharded_state_dict`` gives every parameter's checkpoint key, its
place in the global tensor and a view of the live memory, whatever the pipeline layout, the experts' kind or
the layers' implementation. Nothing is copied and no collective runs.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.placement import LocalTensor
from reshard.device.memory import Finder, Region, check_memory
from reshard.formats.torch_dist import Key, Stored
from reshard.megatron.arguments import megatron_args
from reshard.megatron.checkpoint import EMBEDDING, OUTPUT, placement_of_keys
from reshard.megatron.hybrid import as_gpt_args, class_of_models, pattern_of
from reshard.megatron.parameters import expand
from reshard.models.config_fields import ignored
from reshard.models.field_tables import ROPE_FIELDS
from reshard.models.model import Model
from reshard.models.numerics_args import NUMERICS_ARGS, disagreements
from reshard.models.rope import inverse_frequencies
from reshard.trainers.base import Trainer
from reshard.trainers.plus_one import PlusOne

# Where a checkpoint's chunk would name its file.
IN_MEMORY = Stored("", 0, 0)


class Shard(NamedTuple):
    """One rank's shard of a global tensor, under its checkpoint key; `offsets` and `sizes` count the stacked
    dims in."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str


class MegatronModel(Trainer):
    """The weights of one rank of a trainer.

    `models` is what Megatron's ``get_model`` returns: one chunk for each virtual stage, wrapped (DDP,
    Float16Module) or bare; wrapped where DDP has ``overlap_param_gather``.
    `metadata` is handed to ``sharded_state_dict``; a trainer that keeps its process
    groups out of ``parallel_state`` passes ``{"dp_cp_group": group}``.

    Raises ReshardError for what has no plain memory: quantized parameters, interleaved gate and up rows.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module] | torch.nn.Module,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        from reshard.megatron.compat import gathers_at_forward

        chunks = chunks_of(models)
        self.models = [unwrapped(chunk) for chunk in chunks]
        self.gathering = [
            layer for chunk in chunks for layer in layers_of(chunk) if _overlaps_param_gather(layer)
        ]
        if not self.gathering and any(map(gathers_at_forward, self.models)):
            raise ReshardError(
                "the trainer's DDP gathers parameters at the next forward (overlap_param_gather), and was taken off the chunks that "
                "are given here: give them in it, as get_model returned them"
            )
        if not isinstance(metadata, Mapping | None):
            raise ReshardError(f"metadata is {metadata!r:.80}, not a dictionary for sharded_state_dict")
        check_memory(self.models)
        self.config = self.models[0].config
        if getattr(self.config, "moe_mlp_glu_interleave_size", None):
            raise ReshardError(
                "moe_mlp_glu_interleave_size mixes gate and up rows, which is not supported: unset it"
            )
        self._as_published: PlusOne | None = None
        self.shards: list[Shard] = []
        self._regions: list[Region] = []
        self.objects: set[str] = set()
        self._read(dict(metadata) if metadata else None)
        self._tensors = list({id(region.tensor): region.tensor for region in self._regions}.values())
        self._places = _places(self.models, self._tensors)

    def _read(self, metadata: dict[str, Any] | None) -> None:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

        seen: dict[tuple, int] = {}
        elements: Counter[int] = Counter()  # that shards have, by the tensor's identity
        for model in self.models:
            named = [*model.named_parameters(), *model.named_buffers()]
            quantized = [
                n
                for n, t in named
                if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.dtype.itemsize < 2
            ]
            if [n for n in quantized if "_extra_state" not in n]:
                raise ReshardError(f"quantized parameters cannot be refitted from: {listed(quantized, 3)}")
            state = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            apply_factories(state)
            # Not before: asked for its state, a router makes its expert_bias float32 again, which is a new
            # tensor.
            finder = Finder([*model.named_parameters(), *model.named_buffers()])
            for entry in nested_values(state):
                if isinstance(entry, ShardedObject):
                    self.objects.add(entry.key)
                if not isinstance(entry, ShardedTensor):
                    continue
                prepended = entry.prepend_axis_num
                sizes = (*(1,) * prepended, *entry.local_shape)
                shard = Shard(
                    entry.key, tuple(entry.global_shape), tuple(entry.global_offset), sizes, str(entry.dtype)
                )
                region = finder.region(entry.data, entry.key)
                elements[id(region.tensor)] += entry.data.numel()
                if shard[:4] in seen:
                    continue  # a tied output layer, or the embedding that an MTP stage shares
                seen[shard[:4]] = len(self.shards)
                self.shards.append(shard)
                self._regions.append(region)
        self._left_out = [
            name
            for model in self.models
            for name, parameter in model.named_parameters()
            if elements[id(parameter)] < parameter.numel()
        ]

    @property
    def regions(self) -> list[Region]:
        """See `Trainer.regions`: of the model's own parameters and buffers, as they are now."""
        now = self._now()
        if not all(map(operator.is_, now, self._tensors)):
            self._look_into(now)
        return self._regions

    @property
    def has_pending_sync(self) -> bool:
        """With ``overlap_param_gather`` a rank has what the others have stepped only from the next
        forward on."""
        return bool(self.gathering)

    def sync_params(self) -> None:
        """See `Trainer.sync_params`: gather now, as Megatron-LM does before it saves."""
        for chunk in self.gathering:
            check_memory([chunk])
            try:
                with torch.no_grad():
                    chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            except RuntimeError as error:
                raise ReshardError(
                    f"the trainer's parameters could not be gathered after its last step ({first_line(error)})"
                ) from error

    def addresses(self) -> list[int]:
        """See `Trainer.addresses`; called before every refit, so that the tensors' places are kept at
        hand."""
        try:
            return list(map(torch.Tensor.data_ptr, self._now()))
        except TypeError:  # no tensor
            return [region.tensor.data_ptr() for region in self.regions]

    def _now(self) -> list[Any]:
        """Return what the model has now in the places of `_tensors`; None where it has nothing."""
        return list(map(dict.get, *self._places))

    def _look_into(self, now: list[Any]) -> None:
        """Look into these tensors from now on. Raises ReshardError where one differs in form from
        the one that it replaces."""
        others = {id(before): tensor for before, tensor in zip(self._tensors, now, strict=True)}
        for index, region in enumerate(self._regions):
            if _layout_of(others[id(region.tensor)]) != _layout_of(region.tensor):
                raise ReshardError(
                    f"the trainer's {self.name_of(index)} is gone, or has another shape, dtype or order than it had: make a "
                    f"MegatronModel of it anew, and connect again"
                )
        self._regions[:] = [region._replace(tensor=others[id(region.tensor)]) for region in self._regions]
        self._tensors = now

    def name_of(self, index: int) -> str:
        """Return the checkpoint key of a region."""
        return self.shards[index].key

    def publish(self, model: Model) -> list[LocalTensor]:
        """See `Trainer.publish`; each shard goes by its checkpoint key.

        Raises ReshardError too for parameters that the model's ``sharded_state_dict`` leaves out,
        such as adapters.
        """
        if self._left_out:
            raise ReshardError(
                f"the trainer's model has {len(self._left_out)} parameters that no published tensor fills, since its "
                f"sharded_state_dict leaves them out: {listed(self._left_out)}"
            )
        keys: dict[str, Key] = {}
        for shard in self.shards:
            key = keys.setdefault(shard.key, Key(dtype_named(shard.dtype), shard.shape))
            key.chunks[shard.offsets, shard.sizes] = IN_MEMORY
        where = "the trainer's model"
        vocabulary = next((keys[name].shape[0] for name in (EMBEDDING, OUTPUT) if name in keys), None)
        if vocabulary is not None and vocabulary < model.symbols["V"]:
            raise ReshardError(
                f"{where} has {vocabulary} vocabulary rows, fewer than vocab_size "
                f"{model.symbols['V']} of {model.where}"
            )
        if model.mtp_layers and not any(key.startswith("mtp.") for key in keys):
            model = replace(model, mtp_layers=0)
        mapping = expand(model, padded_vocab=vocabulary, model_class=class_of_models(self.models))
        placement = placement_of_keys(keys, self.objects, where, model, mapping, complete=False).placement
        index_of = {(shard.key, shard.offsets, shard.sizes): index for index, shard in enumerate(self.shards)}
        held: dict[int, LocalTensor] = {}
        for tensor in placement.tensors.values():
            *chunk, before = tensor.id
            index = index_of[tuple(chunk)]
            if before or index in held:
                raise ReshardError(
                    f"{where} has several layers or experts in one shard of {self.shards[index].key}, which "
                    f"is not supported"
                )
            held[index] = tensor._replace(id=index)
        return [held[index] for index in range(len(self.shards))]

    def as_published(self, model: Model) -> Trainer:
        """See `Trainer.as_published`; the weights of some norms are held less 1."""
        names = expand(model).less_one
        if not names:
            return self
        if self._as_published is None or self._as_published.model != model:
            self._as_published = PlusOne(self, model, names)
        return self._as_published

    def check_model(self, model: Model, without: frozenset[str] = frozenset()) -> None:
        """Raise ReshardError where Megatron's model computes something else than the one that is served, with
        both values: any setting of its config or of the model itself that decides what it computes, but for
        those `without`, and the frequencies of its rotary embeddings."""
        wanted = megatron_args(model)
        for chunk in self.models:
            for name, theirs, ours in disagreements(
                as_gpt_args(_settings(chunk), "the trainer's model"), wanted
            ):
                if name not in ignored() | without:
                    raise ReshardError(
                        f"the trainer's {name} is {theirs}, but the served model's is {ours} ({model.where})"
                    )
            dtype = getattr(self.config, "moe_router_dtype", None)
            if model.num_experts and dtype not in (None, wanted.get("moe_router_dtype")):
                raise ReshardError(
                    f"the trainer's moe_router_dtype is {dtype}, but the served model's is "
                    f"{wanted.get('moe_router_dtype')}"
                )
            _check_rotary(chunk, model)


def _places(
    models: Sequence[torch.nn.Module], tensors: Sequence[torch.Tensor]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return, for each of these tensors, the dict of its module that holds it, and its name there:
    a trainer that moves its model as a module (``to``, ``cpu``) makes new buffers."""
    places: dict[int, tuple[dict[str, Any], str]] = {}
    for module in (module for model in models for module in model.modules()):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                places.setdefault(id(tensor), (held, name))  # of what modules share the first
    of_tensors = [places[id(tensor)] for tensor in tensors]
    return [held for held, _ in of_tensors], [name for _, name in of_tensors]


def _layout_of(tensor: Any) -> tuple | None:
    """Return what has to stay for a tensor's region to hold; None for anything else than a tensor."""
    return (tensor.shape, tensor.stride(), tensor.dtype) if isinstance(tensor, torch.Tensor) else None


def _settings(model: torch.nn.Module) -> dict[str, Any]:
    """Return the settings of a live model that decide what it computes, by the names of Megatron's
    arguments."""
    config: Any = model.config
    settings = {name: getattr(config, name) for name in NUMERICS_ARGS if hasattr(config, name)}
    gated, function = getattr(config, "gated_linear_unit", None), getattr(config, "activation_func", None)
    if gated is not None and function is not None:
        settings["swiglu"] = gated and getattr(function, "__name__", type(function).__name__).lower() in (
            "silu",
            "swish",
        )
    if hasattr(config, "num_moe_experts"):
        settings["num_experts"] = config.num_moe_experts
    if isinstance(getattr(model, "share_embeddings_and_output_weights", None), bool):
        settings["untie_embeddings_and_output_weights"] = not model.share_embeddings_and_output_weights
    settings["hybrid_layer_pattern"] = pattern_of(model)
    of_model = {"position_embedding_type": "position_embedding_type"}
    if not settings.get("multi_latent_attention"):
        of_model |= {
            "rotary_base": "rotary_base",
            "rotary_percent": "rotary_percent",
            "use_rope_scaling": "rotary_scaling",
        }
    return settings | {arg: getattr(model, name) for arg, name in of_model.items() if hasattr(model, name)}


def _check_rotary(model: torch.nn.Module, served: Model) -> None:
    """Raise ReshardError where a rotary embedding of the model turns at other frequencies, or scales
    otherwise, than the served one."""
    expected = served.inverse_frequencies()
    for name, module in model.named_modules():
        angles = _frequencies(module)
        if angles is None or rope_is_ignored():
            continue
        if len(angles) != len(expected):
            raise ReshardError(
                f"the trainer's {name} turns {len(angles)} pairs of dims, but the served model's {len(expected)} "
                f"({served.where})"
            )
        far = [i for i, (a, b) in enumerate(zip(angles, expected)) if not math.isclose(a, b, rel_tol=1e-4)]
        if far:
            i = far[0]
            raise ReshardError(
                f"the trainer's {name} has inv_freq[{i}] = {angles[i]:.6g}, but the served "
                f"model's is {expected[i]:.6g} ({served.where})"
            )


def rope_is_ignored() -> bool:
    """Return True where a field of the config that rotary embeddings follow from is ignored."""
    return bool(ignored() & {*ROPE_FIELDS, "rotary_base", "max_position_embeddings"})


def _frequencies(module: torch.nn.Module) -> list[float] | None:
    """Return the angles by which a rotary embedding of Megatron turns from one position to the
    next; None for other modules."""
    plain = getattr(module, "inv_freq", None)
    if not isinstance(plain, torch.Tensor) or plain.ndim != 1:
        return None
    if hasattr(module, "inv_freq_extra"):  # YaRN, which mixes the two at every step
        names = ("scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        values: dict[str, Any] = {name: getattr(module, name) for name in names}
        values |= {
            "factor": values["scaling_factor"],
            "truncate": getattr(module, "correction_range_round_to_int", True),
        }
        return inverse_frequencies(
            values | {"rope_type": "yarn", "rope_theta": module.rotary_base}, 2 * len(plain)
        )
    factor = getattr(module, "seq_len_interpolation_factor", None) or 1
    return [angle / factor for angle in plain.tolist()]


def chunks_of(models: Any) -> list[torch.nn.Module]:
    """Return a trainer's chunks as a list. Raises ReshardError where these are no modules, or none."""
    chunks = [models] if isinstance(models, torch.nn.Module) else models
    if isinstance(chunks, Sequence) and not chunks:
        raise ReshardError("the trainer's list of models is empty")
    if isinstance(chunks, Sequence) and all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        return list(chunks)
    raise ReshardError(f"models is a {type(models).__name__}: give the list of chunks that the trainer holds")


def layers_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a chunk, and what each wrapper has inside."""
    while isinstance(model, torch.nn.Module):
        yield model
        model = getattr(model, "module", None)  # type: ignore[assignment]


def _overlaps_param_gather(layer: torch.nn.Module) -> bool:
    return bool(getattr(getattr(layer, "ddp_config", None), "overlap_param_gather", False))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the Megatron-Core model inside DDP, Float16Module and the like. Raises ReshardError
    where there is none."""
    while not hasattr(model, "sharded_state_dict") or hasattr(model, "module"):
        inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise ReshardError(
                f"{type(model).__name__} is no Megatron-Core model: it has no sharded_state_dict"
            )
        model = inner
    return model
