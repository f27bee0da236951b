"""A live transformers model under FSDP2 (``fully_shard``), also with tensor parallelism, as the source of a
refit.

Every parameter is a DTensor, which says itself which box of the whole it has here
(``compute_local_shape_and_global_offset``); nothing is gathered. Parameters have their published names, but
for those of `Family.in_memory`, and for experts: transformers 5 keeps those of a layer in one tensor,
``experts.gate_up_proj [experts, 2 * F, H]`` and ``experts.down_proj [experts, H, F]``.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, as_matrix
from reshard.core.views import tensor_shapes, view_parts, views_by_tensor
from reshard.megatron.parameters import expand
from reshard.models.family import architectures, family_of, has_table
from reshard.models.model import Model, different_fields
from reshard.models.published import published
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import ClassFamily, any_model, as_saved, check_tower, tower_of
from reshard.refit.trainer import Trainer
from reshard.trainers.fsdp_lora import FsdpAdapter
from reshard.trainers.fsdp_saved import SavedPieces, check_saved
from reshard.trainers.fsdp_shards import FUSED, FsdpShards, LocalParameter, check_is_transformers
from reshard.trainers.lora_scales import without_adapter_error


class FsdpModel(FsdpShards):
    """The weights of one rank of a transformers model under ``fully_shard``.

    Parameters that are no DTensors are whole on every rank. Make it, and refit, between two training steps,
    when FSDP has its parameters sharded.

    Raises ReshardError, naming the parameter, for what is not a box of the whole: partial sums, quantized
    tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        check_is_transformers(model)
        self._saved = _saved_pieces(model)
        super().__init__(model)
        self._is_split = False  # the adapter is another source's
        self._weights: FsdpModel | None = None  # without it
        self._in_saved_form: FsdpModel | None = None  # what a table has otherwise

    def split_adapter(self) -> tuple[Trainer, Trainer]:
        """Return the weights without PEFT's adapter, and the adapter, as two sources."""
        return self.below_adapter(), FsdpAdapter(self.model)

    def below_adapter(self) -> "FsdpModel":
        """Return the weights without PEFT's adapter as they are at each refit: merged, where it is then."""
        if self._weights is None:
            self._weights = copy(self)
            self._weights._is_split, self._weights._in_saved_form = True, None
        return self._weights

    def _is_of_experts(self, held: LocalParameter) -> bool:
        return super()._is_of_experts(held) if self._saved is None else self._saved.is_stack(held.name)

    def check_model(self, model: Model) -> None:
        """Compare transformers' config of this rank's model with `model`."""
        config = _config_of(self.model)
        own = any_model(config, "the trainer's config")
        check_tower(_of_class(self.model, config), model, own.where)
        for name, (ours, theirs) in different_fields(own, model).items():
            raise ReshardError(
                f"the trainer's {name} is {ours}, but the served model's is {theirs} ({model.where})"
            )

    def as_published(self, model: Model) -> "FsdpModel":
        """Return the same with experts as transformers' class saves them, where a table has them otherwise: an engine
        takes them so (`reshard.engines.placing.saved`)."""
        if self._saved is None or not model.family.has_megatron_names:
            return self
        if self._in_saved_form is None:
            self._in_saved_form = copy(self)
            self._in_saved_form._in_saved_form = self._in_saved_form
        return self._in_saved_form

    def publish(self, model: Model) -> list[LocalTensor]:
        if self.adapter_names and not self._is_split:
            raise without_adapter_error("the trainer's model", self.adapter_names)
        if self._saved is not None and model.family.has_megatron_names and self._in_saved_form is not self:
            raise ReshardError(
                f"{model.where}: transformers holds the experts of a {model.family.architecture} "
                "transposed, which a refit brings to an engine, and nothing else: train it with Megatron, or publish "
                "it with save_pretrained"
            )
        if self._saved is not None:
            of_class = as_saved(model) if model.family.has_megatron_names else model
            check_saved(self._saved, self.held, expand(of_class).shapes, model.where)
            saved = [local for held in self.held for local in self._saved.local_tensors(held)]
            return [local._replace(id=index) for index, local in enumerate(saved)]
        shapes, published_names = expand(model).shapes, model.names_in_memory()
        views = views_by_tensor(shapes)
        tensors = [local for held in self.held for local in _locals(held, shapes, views, published_names)]
        if model.config.get(TAKES_TOWER):
            tensors = self._with_tower(model, tensors)
        unknown = sorted({self._names[index] for index, local in enumerate(tensors) if local is None})
        if unknown:
            raise ReshardError(
                f"the trainer's model holds {len(unknown)} parameters that {model.family.name} does not "
                f"have: {listed(unknown)}{_beside(model)}"
            )
        return [local._replace(id=index) for index, local in enumerate(tensors) if local is not None]

    def _with_tower(self, model: Model, tensors: list[LocalTensor | None]) -> list[LocalTensor | None]:
        """Return the local tensors with those of the parts beside the language model."""
        tower = tower_of(model, _of_class(self.model, _config_of(self.model)))
        if tower is None or not isinstance(tower.family, ClassFamily):
            return tensors
        pieces = SavedPieces(tower.family.saved)
        of_tower = [
            local
            for held in self.held
            for local in (
                pieces.local_tensors(held) if held.name in pieces.pieces else [None] * held.matrices
            )
        ]
        return [local or tensor for tensor, local in zip(tensors, of_tower, strict=True)]


def _beside(model: Model) -> str:
    """Return what to do where the engine takes nothing of what is beside its language `model`; empty for others."""
    if not model.wrapped or model.config.get(TAKES_TOWER):
        return ""
    return (
        "; this engine takes nothing beside its language model, and its log says why: start it so that it serves that "
        "as its loader copies it, without quantization"
    )


def _config_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the config of a transformers model as it would be published, with the name of its class."""
    inner, name = _of_transformers(model)
    config = inner.config.to_dict()
    named = config | {"architectures": [name] if name else architectures(config)}
    # One that was made from a config names no class: then a table is told by the type, and also knows its classes.
    keeps = has_table(config) and (architectures(config) or not has_table(named))
    return published(config if keeps else named, "the trainer's config")


def _of_transformers(model: torch.nn.Module) -> tuple[Any, str]:
    """Return the first module inside a model that is of a class of transformers, and the name of that; the model itself
    if none is."""
    import transformers

    known = (
        (module, kind.__name__)
        for module in model.modules()
        for kind in type(module).__mro__
        if hasattr(kind, "config_class") and getattr(transformers, kind.__name__, None) is kind
    )
    return next(known, (model, ""))


def _of_class(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a larger model with the name of its class, where transformers has one of its own."""
    _, name = _of_transformers(model)
    is_own = (
        bool(name) and has_table(config) and name == family_of(config, "the trainer's config").wrapped_class
    )
    return config | {"architectures": [name]} if is_own else config


def _saved_pieces(model: torch.nn.Module) -> SavedPieces | None:
    """Return what transformers saves of a model that no mapping table covers, whose table refuses its config, or has
    experts otherwise than transformers' class; None for another one with a table."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return None
    config, where = _config_of(model), "the trainer's config"
    try:
        served = any_model(config, where)
    except ReshardError:
        if has_table(config) and family_of(config, where).experts_apart:
            return None  # connect says what is wrong
        raise
    if not isinstance(served.family, ClassFamily):
        if served.family.experts_apart:
            return None
        served = as_saved(served)
    assert isinstance(served.family, ClassFamily)
    return SavedPieces(served.family.saved)


def _locals(
    held: LocalParameter,
    shapes: Mapping[str, tuple[int, ...]],
    views: Mapping[str, list[str]],
    published_names: Mapping[str, str],
) -> list[LocalTensor | None]:
    """Return the local tensors of a parameter, one for each of its regions; None if the model
    has no such tensor.

    Raises ReshardError if it has another shape.
    """
    name = published_names.get(held.name, held.name)
    if name in views:
        stored = tensor_shapes({view: shapes[view] for view in views[name]})[name]
        _check_shape(held, stored)
        if len(stored) == 2 and stored[0] == 1:  # one vector, which the file has as a matrix of one row
            [view] = views[name]
            vector = Box(held.box.offsets[1:], held.box.lengths[1:])
            return [LocalTensor(0, vector.lengths, (Part(view, vector, (0,)),))]
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
    """Return the box of a parameter as one of a matrix or a vector. Raises ReshardError if it is split along
    a dim after the second."""
    offsets, lengths = held.box
    if len(lengths) > 2 and lengths[1:] != held.shape[1:]:
        raise ReshardError(f"the trainer's {held.name} is split along another dim than the first")
    return held.box if len(lengths) < 3 else Box((offsets[0], 0), as_matrix(lengths))


def _check_shape(held: LocalParameter, shape: tuple[int, ...]) -> None:
    if held.shape != shape:
        raise ReshardError(f"the trainer's {held.name} has shape {list(held.shape)}, expected {list(shape)}")
