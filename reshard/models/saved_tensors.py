"""The tensors of a checkpoint that transformers would save of a model, and where each lies in the model's memory: read
from transformers' class alone.

Transformers keeps some tensors otherwise than its checkpoints do, such as the experts of a layer in one, and converts
them as it saves. That conversion is run here on a model without memory. What comes out are views of the model's
parameters, and a view says which box of which parameter it is.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.core.extras import importing
from reshard.core.placement import as_matrix

with importing("parity"):
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode
try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise ReshardError(
        f"a model without a mapping table needs transformers 5, which says how its class saves it, and this is "
        f"{transformers.__version__}: pip install -U transformers"
    ) from error

from reshard.models.config_fields import has_no_effect

# Fields by which a head gets its size.
LABELS = ("id2label", "label2id", "num_labels")
_OF_EXPERTS = re.compile(r"experts\b|_moe\b")


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint, or a view of one (`reshard.core.views`): its shape, and the `box` that it is of a
    `parameter` of the model, which has the shape `parameter_shape`. Dims of the parameter of which it has one index may
    be lacking. A single number, a tensor without dims, has the shape of a vector of one."""

    shape: tuple[int, ...]
    parameter: str
    parameter_shape: tuple[int, ...]
    box: Box


def saved_tensors(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint of a model of transformers' class `architecture`, by name.

    Raises ReshardError if the installed transformers has no such class, cannot make a model of the config, or computes
    something as it saves.
    """
    full = full_config(architecture, config, where)
    try:
        model = _without_memory(architecture, json.dumps(_decisive(full), default=str))
    except Exception as error:  # a model class does what it likes
        raise ReshardError(
            f"{where}: transformers cannot make a {architecture} of it ({type(error).__name__}: {error})"
        ) from error
    return _tensors_of(model, where)


def repeated_names(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the names in a model's state dict of tensors that it has under another name before, as those of a tied
    output layer are, each with that name."""
    full = full_config(architecture, config, where)
    model = _without_memory(architecture, json.dumps(_decisive(full), default=str))
    first: dict[int, str] = {}
    named = {name: first.setdefault(_storage(tensor), name) for name, tensor in model.state_dict().items()}
    return {name: other for name, other in named.items() if name != other}


def has_class(architecture: str) -> bool:
    """Return True if the installed transformers has a model class of this name."""
    return getattr(getattr(transformers, architecture, None), "config_class", None) is not None


def full_config(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config with all fields that transformers' class has, as this class reads it. Raises ReshardError if the
    installed transformers has no such class, or the class cannot read it."""
    kind: Any = getattr(transformers, architecture, None)
    if not has_class(architecture):
        raise ReshardError(
            f"{where}: no mapping table covers {architecture}, and transformers {transformers.__version__} has no "
            f"model class of this name, by which a refit could do without one"
        )
    try:
        full: dict[str, Any] = kind.config_class.from_dict(_with_infinities(config)).to_dict()
    except Exception as error:  # a config class checks what it likes
        raise ReshardError(
            f"{where} is no config of {architecture} ({type(error).__name__}: {error})"
        ) from error
    return full


def _decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the fields that have no effect on what the weights compute, but for those by which a
    model class makes or checks its parameters."""
    kept = {
        name: value for name, value in config.items() if name in LABELS or str(name).endswith("_token_id")
    }
    return kept | {
        name: _decisive(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not has_no_effect(str(name))
    }


def _with_infinities(value: Any) -> Any:
    """Return a setting with infinities for what a JSON has in their place."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_infinities(entry) for name, entry in value.items()}
    return [_with_infinities(entry) for entry in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4)
def _without_memory(architecture: str, config: str) -> Any:
    """Return a model of a class and a config without memory. It is kept: an engine that is made of transformers' own
    classes, as vLLM's "Transformers backend" is, changes them in its process, after which only it can make one."""
    kind: Any = getattr(transformers, architecture)
    made = kind.config_class.from_dict(json.loads(config))
    with torch.device("meta"):
        model = kind._from_config(made, dtype=torch.bfloat16, attn_implementation="eager")
    # Without these, transformers saves it as one that no published checkpoint was read into, and leaves out prefixes
    # that published ones have, and that engines know.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    return model


def _tensors_of(model: Any, where: str) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint of a model that has no memory, by name. Raises ReshardError if transformers
    computes one of them as it saves."""
    parameters: dict[int, tuple[str, tuple[int, ...]]] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if _storage(tensor) not in parameters:  # of a tied embedding the first name is saved
            parameters[_storage(tensor)] = name, tuple(tensor.shape)
            state[name] = tensor
    try:
        with _ClonesAreViews():
            saved = revert_weight_conversion(model, state)
    except Exception as error:  # such as a view that cannot be one
        raise ReshardError(
            f"{where}: transformers computes tensors as it saves a {type(model).__name__}, and a refit copies rows: "
            f"publish it with save_pretrained ({type(error).__name__}: {error})"
        ) from error
    tensors: dict[str, SavedTensor] = {}
    for name, tensor in saved.items():
        parameter, shape = parameters.get(_storage(tensor), ("", ()))
        box = _box(shape, tensor) if parameter else None
        if box is None:
            raise ReshardError(
                f"{where}: transformers computes {name} as it saves a {type(model).__name__}, and a refit copies rows: "
                f"publish it with save_pretrained"
            )
        if not tensor.ndim and not tensor.is_floating_point():
            raise ReshardError(
                f"{where}: {name} is a single whole number, which no refit moves: publish it with save_pretrained"
            )
        tensors |= _apart(name, SavedTensor(tuple(tensor.shape) or (1,), parameter, shape, box))
    return tensors


def _apart(name: str, saved: SavedTensor) -> dict[str, SavedTensor]:
    """Return a tensor of a checkpoint by name; one that has all experts of a layer as one view for each."""
    shape, parameter, parameter_shape, (offsets, lengths) = saved
    if len(shape) != 3 or lengths != shape or not _OF_EXPERTS.search(name):
        return {name: saved}
    return {
        f"{name}[{expert}]": SavedTensor(
            shape[1:],
            parameter,
            parameter_shape,
            Box((offsets[0] + expert, *offsets[1:]), (1, *shape[1:])),
        )
        for expert in range(shape[0])
    }


def places_of(saved: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Return the part of the model's parameters that each tensor of a checkpoint is, as a name or a view of one
    (`reshard.core.views`)."""
    return {name: _place(name, tensor) for name, tensor in saved.items()}


def _place(name: str, saved: SavedTensor) -> str:
    shape, parameter, parameter_shape, (offsets, lengths) = saved
    if not parameter_shape or (shape == parameter_shape and lengths == shape):
        return parameter
    selections, rest = [], list(shape)
    for size, first, length in zip(parameter_shape, offsets, lengths, strict=True):
        if rest and rest[0] == length:
            del rest[0]
            selections.append(":" if length == size else f"{first}:{first + length}")
        elif length == 1:
            selections.append(str(first))
        else:
            raise ReshardError(f"transformers saves {name} in another shape than it has in {parameter}")
    return f"{parameter}[{', '.join(selections)}]"


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _ClonesAreViews(TorchDispatchMode):
    """Inside, a copy of a tensor without memory is a view of it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise TypeError(f"{func} changes a tensor in place")
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            func, kwargs, args = torch.ops.aten.alias.default, {}, args[:1]
        return func(*args, **(kwargs or {}))


def _box(shape: tuple[int, ...], view: torch.Tensor) -> Box | None:
    """Return the box of a contiguous tensor of this shape that a view is, in the order of its elements; None if it is
    none."""
    if view.is_contiguous() and view.numel() == prod(shape):
        return whole(shape) if as_matrix(tuple(view.shape)) == as_matrix(shape) else None
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets, rest = [], int(view.storage_offset())
    for stride in strides:
        offsets.append(rest // stride)
        rest %= stride
    lengths, dim = [1] * len(shape), 0
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            continue
        while dim < len(shape) and (strides[dim] != stride or shape[dim] == 1):
            dim += 1
        if dim == len(shape) or offsets[dim] + length > shape[dim]:
            return None
        lengths[dim] = length
    return Box(tuple(offsets), tuple(lengths))
