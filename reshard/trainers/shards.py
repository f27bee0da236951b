"""The shards of a live Megatron-Core model, as its ``sharded_state_dict`` says what it holds: every parameter's
checkpoint key, its place in the global tensor and a view of the live memory, whatever the pipeline layout, the
experts' kind or the layers' implementation. Nothing is copied and no collective runs."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.placement import LocalTensor
from reshard.device.host_copies import beside, copy_of, place_of
from reshard.device.memory import Finder, Region, check_memory, is_readable
from reshard.formats.torch_dist import Key, Stored
from reshard.megatron.checkpoint import placement_of_keys
from reshard.megatron.gtp import Gtp
from reshard.megatron.parameters import ModelParameters
from reshard.megatron.towers import text_key
from reshard.models.model import Model
from reshard.refit.trainer import Trainer

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


class ShardedModel(Trainer):
    """The shards of one rank of a trainer, each a region of its live memory: all of them, or those that
    `_published_key` chooses.

    `models` is what Megatron's ``get_model`` returns: one chunk for each virtual stage, wrapped (DDP,
    Float16Module) or bare; wrapped where DDP has ``overlap_param_gather``. `metadata` is handed to
    ``sharded_state_dict``.

    Raises ReshardError for what has no plain memory: quantized parameters, interleaved gate and up rows.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module] | torch.nn.Module,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        from reshard.megatron.compat import gathers_at_forward

        self.chunks, self.metadata = chunks_of(models), metadata
        self.models = [unwrapped(chunk) for chunk in self.chunks]
        self.texts = [language_model_of(model) for model in self.models]
        self.gathering = [
            layer for chunk in self.chunks for layer in layers_of(chunk) if _overlaps_param_gather(layer)
        ]
        if not self.gathering and any(map(gathers_at_forward, self.models)):
            raise ReshardError(
                "the trainer's DDP gathers parameters at the next forward (overlap_param_gather), and was "
                "taken off the chunks that are given here: give them in it, as get_model returned them"
            )
        if not isinstance(metadata, Mapping | None):
            raise ReshardError(f"metadata is {metadata!r:.80}, not a dictionary for sharded_state_dict")
        check_memory(self.models)
        self.config = self.texts[0].config
        if getattr(self.config, "moe_mlp_glu_interleave_size", None):
            raise ReshardError(
                "moe_mlp_glu_interleave_size mixes gate and up rows, which is not supported: unset it"
            )
        self.gtp = _gtp_of(self.models)
        self.gtp_padding: dict[str, int] = {}  # rows of a key that are GTP's, where only TP splits it besides
        self.shards: list[Shard] = []
        self._regions: list[Region] = []
        self.objects: set[str] = set()
        self._read(dict(metadata) if metadata else None)
        self._tensors = list({id(region.tensor): region.tensor for region in self._regions}.values())
        self._places = _places(self.models, self._tensors)
        self._device = next((tensor.device for tensor in self._tensors), None)
        self._buffers = [
            buffer
            for chunk in self.chunks
            for layer in layers_of(chunk)
            for kind in ("buffers", "expert_parallel_buffers")
            for buffer in _sequence(getattr(layer, kind, None))
        ]
        # By the tensor's identity: it, the place of its storage's copy, and the copy.
        self._host_copies: dict[int, tuple[torch.Tensor, Any, torch.Tensor]] = {}

    def _read(self, metadata: dict[str, Any] | None) -> None:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

        from reshard.megatron import compat

        seen: dict[tuple, int] = {}
        elements: Counter[int] = Counter()  # that shards have, by the tensor's identity
        for model in self.models:
            named = [*model.named_parameters(), *model.named_buffers()]
            quantized = [
                n
                for n, t in named
                if (type(t) not in (torch.Tensor, torch.nn.Parameter) and compat.gtp_ranks(t) == 1)
                or t.dtype.itemsize < 2
            ]
            if [n for n in quantized if "_extra_state" not in n]:
                raise ReshardError(f"quantized parameters cannot be refitted from: {listed(quantized, 3)}")
            state = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            apply_factories(state)
            # Not before: asked for its state, a router makes its expert_bias float32 again, which is a new
            # tensor.
            finder = Finder([*model.named_parameters(), *model.named_buffers()])
            for entry in nested_values(state):
                if not isinstance(entry, ShardedObject | ShardedTensor):
                    continue
                key = self._published_key(text_key(entry.key))
                if key is None:
                    continue
                if isinstance(entry, ShardedObject):
                    self.objects.add(key)
                    continue
                prepended = entry.prepend_axis_num
                sizes = (*(1,) * prepended, *entry.local_shape)
                shard = Shard(
                    key, tuple(entry.global_shape), tuple(entry.global_offset), sizes, str(entry.dtype)
                )
                region = finder.region(entry.data, entry.key)
                elements[id(region.tensor)] += entry.data.numel()
                if padding := compat.gtp_padding(entry.data):
                    stored = entry.local_shape[0] * entry.data.gtp_remat_size
                    self.gtp_padding[key] = entry.global_shape[prepended] // stored * padding
                if shard[:4] in seen:
                    continue  # a tied output layer, or the embedding that an MTP stage shares
                seen[shard[:4]] = len(self.shards)
                self.shards.append(shard)
                self._regions.append(region)
        self._left_out = [
            name
            for model in self.models
            for name, parameter in model.named_parameters()
            if self._published_key(text_key(name)) is not None and elements[id(parameter)] < parameter.numel()
        ]

    def _published_key(self, key: str) -> str | None:
        """Return the key under which a tensor of the model's is published, from its checkpoint key or its
        name in the model; None if it is not published."""
        return key

    @property
    def device(self) -> torch.device | None:
        """The device where the parameters were first, since trainers move them to the host."""
        return self._device

    @property
    def memory(self) -> list[Region]:
        """The memory of the model's own parameters and buffers, as they are now, and of the host's copies of
        those that have no memory."""
        now = self._now()
        if not all(map(operator.is_, now, self._tensors)):
            self._look_into(now)
        return self._regions

    @property
    def has_pending_sync(self) -> bool:
        """With ``overlap_param_gather`` a rank has what the others have stepped only from the next
        forward on."""
        return bool(self.gathering)

    def is_readable_from_host(self) -> bool:
        """Return True if all is in memory that the device reads, and nothing has to be gathered first."""
        if self.device is None or self.has_pending_sync:
            return False
        return all(is_readable(tensor, self.device) for tensor in self._now())

    def sync_params(self) -> None:
        """Gather now, as Megatron-LM does before it saves."""
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
        """Return the addresses now. Called before every refit, so that the tensors' places are kept at
        hand."""
        try:
            # A model with adapters of experts has ten thousand tensors: each is asked once.
            held: list[Any] = list(map(dict.get, *self._places))
            addresses = list(map(torch.Tensor.data_ptr, held))
            return addresses if all(addresses) else list(map(torch.Tensor.data_ptr, self._now()))
        except TypeError:  # no tensor
            return [region.tensor.data_ptr() for region in self.memory]

    def _now(self) -> list[Any]:
        """Return what the model has now in the places of `_tensors`, or the host's copy of it; None if
        it has nothing."""
        now: list[Any] = list(map(dict.get, *self._places))
        try:
            if all(map(torch.Tensor.data_ptr, now)):
                return now
        except TypeError:  # no tensor
            return now
        others, places = beside(self._buffers), dict[int, Any]()
        return [self._on_host(tensor, others, places) for tensor in now]

    def _on_host(
        self, tensor: torch.Tensor, others: Mapping[int, torch.Tensor], places: dict[int, Any]
    ) -> torch.Tensor:
        """Return the host's copy of a tensor without memory, always the same one while it stays in its place;
        else the tensor. `places` are those of storages (`place_of`) as they are looked up."""
        storage = tensor.untyped_storage()
        place = places.get(storage._cdata)
        if place is None:
            place = places[storage._cdata] = place_of(storage, others)
        if not place:
            return tensor
        known = self._host_copies.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != place:
            copy = copy_of(tensor, others)
            if copy is None:
                return tensor
            known = self._host_copies[id(tensor)] = tensor, place, copy
        return known[2]

    def _look_into(self, now: list[Any]) -> None:
        """Look into these tensors from now on. Raises ReshardError if one differs in form from
        the one that it replaces."""
        others = {id(before): tensor for before, tensor in zip(self._tensors, now, strict=True)}
        for index, region in enumerate(self._regions):
            if _layout_of(others[id(region.tensor)]) != _layout_of(region.tensor):
                raise ReshardError(
                    f"the trainer's {self.name_of(index)} is gone, or has another shape, dtype or order "
                    "than it had: make a MegatronModel of it anew, and connect again"
                )
        self._regions[:] = [region._replace(tensor=others[id(region.tensor)]) for region in self._regions]
        self._tensors = now

    def name_of(self, index: int) -> str:
        """Return the checkpoint key of a region."""
        return self.shards[index].key

    def _keys(self) -> dict[str, Key]:
        """Return the shards of this rank as the keys of a checkpoint."""
        keys: dict[str, Key] = {}
        for shard in self.shards:
            key = keys.setdefault(shard.key, Key(dtype_named(shard.dtype), shard.shape))
            key.chunks[shard.offsets, shard.sizes] = IN_MEMORY
        return keys

    def _placed(
        self, model: Model, parameters: ModelParameters, where: str
    ) -> Iterator[tuple[int, int, LocalTensor]]:
        """Yield what this rank holds of these parameters: the index of the shard, how many of its elements are ahead,
        and the local tensor. Raises ReshardError for a shard of another shape than `model` calls for."""
        placed = placement_of_keys(self._keys(), self.objects, where, model, parameters, False, self.gtp)
        index_of = {(shard.key, shard.offsets, shard.sizes): index for index, shard in enumerate(self.shards)}
        for tensor in placed.placement.tensors.values():
            *chunk, before = tensor.id
            yield index_of[tuple(chunk)], before, tensor


def _gtp_of(models: Sequence[torch.nn.Module]) -> Gtp:
    """Return among how many ranks GTP splits a model's parameters. Raises ReshardError where its
    ``sharded_state_dict`` would not say which rows this one has."""
    from reshard.megatron import compat

    found = {False: 1, True: 1}
    for model in models:
        for name, parameter in model.named_parameters():
            expert = ".experts." in name
            found[expert] = max(found[expert], compat.gtp_ranks(parameter))
    if max(found.values()) > 1 and not compat.saves_gtp():
        raise ReshardError(
            "the trainer's parameters are sharded by GTP, of which this megatron-core takes no account without "
            "Transformer Engine 2.19: install that"
        )
    return Gtp(found[False], found[True])


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
    """Return what has to stay unchanged for a tensor's region to be valid; None for anything that is not a
    tensor."""
    return (tensor.shape, tensor.stride(), tensor.dtype) if isinstance(tensor, torch.Tensor) else None


def chunks_of(models: Any) -> list[torch.nn.Module]:
    """Return a trainer's chunks as a list. Raises ReshardError if they are not modules, or if there are
    none."""
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


def _sequence(value: Any) -> Sequence[Any]:
    """Return a list or tuple; of anything else, such as a module's method of that name, nothing."""
    return value if isinstance(value, list | tuple) else ()


def _overlaps_param_gather(layer: torch.nn.Module) -> bool:
    return bool(getattr(getattr(layer, "ddp_config", None), "overlap_param_gather", False))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the Megatron-Core model inside DDP, Float16Module or other wrappers. Raises ReshardError if
    there is none."""
    while not hasattr(model, "sharded_state_dict") or hasattr(model, "module"):
        inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise ReshardError(
                f"{type(model).__name__} is not a Megatron-Core model: it has no sharded_state_dict (give a model of "
                f"transformers as reshard.trainers.FsdpModel(model))"
            )
        model = inner
    return model


def language_model_of(model: torch.nn.Module) -> Any:
    """Return the language model in a larger one; the same model if it is one itself."""
    inner = getattr(model, "language_model", None)
    return inner if isinstance(inner, torch.nn.Module) else model
