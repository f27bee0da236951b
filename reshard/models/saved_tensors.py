"""The tensors of a checkpoint that transformers would save of a model, and where each lies in the model's memory: read
from transformers' class alone.

Transformers keeps some tensors otherwise than its checkpoints do, such as the experts of a layer in one, and converts
them as it saves. That conversion is run here on a model without memory. What comes out are views of the model's
parameters, or rows of several that are joined, and a view says which box of which parameter it is.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError, listed, one_line
from reshard.core.extras import importing
from reshard.core.placement import as_matrix

with importing("parity"):
    import torch
    import transformers
try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise ReshardError(
        f"a model without a mapping table needs transformers 5, which says how its class saves it, and this is "
        f"{transformers.__version__}: pip install -U transformers"
    ) from error

from reshard.models.config_fields import has_no_effect
from reshard.models.row_runs import storage_id
from reshard.models.saving import Saving

# Fields by which a head gets its size.
LABELS = ("id2label", "label2id", "num_labels")
_OF_EXPERTS = re.compile(r"experts\b|_moe\b")


class SavedPart(NamedTuple):
    """The `box` of a `parameter` of the model, which has the shape `parameter_shape`, that a tensor of a checkpoint has
    from index `first` of its first dim on. Dims of the parameter of which it has one index may be lacking there."""

    parameter: str
    parameter_shape: tuple[int, ...]
    box: Box
    first: int = 0


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint, or a view of one (`reshard.core.views`): its shape, and its `parts`. One that is joined
    of several has whole rows of parameters with as many dims. A single number, which checkpoints have without dims
    (`is_single`), has the shape of a vector of one. Of one that the class has in whole numbers, `whole_dtype` is the
    name of their dtype; it is empty for a weight. `is_linear` is True for the weight of a linear layer, and
    `keeps_fp32` for what the class has in fp32 where all else is in bf16."""

    shape: tuple[int, ...]
    parts: tuple[SavedPart, ...]
    is_single: bool = False
    whole_dtype: str = ""
    is_linear: bool = False
    keeps_fp32: bool = False

    @property
    def parameter(self) -> str:
        """The parameter that all of it is in; none of one that is joined."""
        return self.parts[0].parameter if len(self.parts) == 1 else ""

    @property
    def takes_adapter(self) -> bool:
        """True for a matrix to which a LoRA's B times A is added as it is: ``[outputs, inputs]`` of a linear layer, or
        of one of the experts in a parameter; False where an adapter would be of other rows, or of the transpose."""
        return len(self.parts) == 1 and (
            self.is_linear or len(self.parts[0].parameter_shape) > len(self.shape)
        )


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
            f"{where}: transformers cannot make a {architecture} of it ({type(error).__name__}: {one_line(error)})"
        ) from error
    try:
        return {**_tensors_of(model)}
    except ReshardError as error:
        raise ReshardError(f"{where}: {error}") from error


def repeated_names(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the names in a model's state dict of tensors that it has under another name before, as those of a tied
    output layer are, each with that name."""
    full = full_config(architecture, config, where)
    model = _without_memory(architecture, json.dumps(_decisive(full), default=str))
    first: dict[int, str] = {}
    named = {name: first.setdefault(storage_id(tensor), name) for name, tensor in model.state_dict().items()}
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
    parts = [*getattr(kind.config_class, "sub_configs", {})]
    within = next((key for key, value in config.items() if _has_parts(value, parts)), None)
    if within is not None and not _has_parts(config, parts):
        raise ReshardError(
            f"{where} has {listed(parts)} in its {within}, where transformers' {architecture} does not read them, so "
            "that its sizes are not known: publish the model with save_pretrained"
        )
    try:
        full: dict[str, Any] = kind.config_class.from_dict(_with_infinities(config)).to_dict()
    except Exception as error:  # a config class checks what it likes
        raise ReshardError(
            f"{where} is no config of {architecture} ({type(error).__name__}: {one_line(error)})"
        ) from error
    return full


def _has_parts(config: Any, parts: Collection[str]) -> bool:
    return isinstance(config, Mapping) and any(isinstance(config.get(part), Mapping) for part in parts)


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
    model._weight_conversions = _as_loaded(get_model_conversion_mapping(model, add_legacy=False))
    return model


def _as_loaded(conversions: list[Any]) -> list[Any]:
    """Return transformers' conversions of a model without those of models inside it that rename what the outer one's
    have renamed before: no tensor of a published checkpoint comes to them as it is loaded, and transformers saves with
    those that it has used. Qwen2-Audio has such in 5.12, for a checkpoint of the inner model alone, and names that went
    through both would have a prefix twice."""
    first = {(*conversion.source_patterns,) for conversion in conversions if not _is_of_part(conversion)}
    return [
        conversion
        for conversion in conversions
        if not (_is_of_part(conversion) and (*conversion.source_patterns,) in first)
    ]


def _is_of_part(conversion: Any) -> bool:
    return getattr(conversion, "scope_prefix", None) is not None


@lru_cache(maxsize=4)
def _tensors_of(model: Any) -> Mapping[str, SavedTensor]:
    """Return the tensors of a checkpoint of a model that has no memory, by name: of a large one that takes seconds, and
    a connect asks several times. Raises ReshardError if transformers computes one of them as it saves."""
    parameters: dict[int, tuple[str, tuple[int, ...]]] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if storage_id(tensor) not in parameters:  # of a tied embedding the first name is saved
            parameters[storage_id(tensor)] = name, tuple(tensor.shape)
            state[name] = tensor
    try:
        with Saving(state.values()) as saving:
            saved = revert_weight_conversion(model, state)
    except Exception as error:  # such as a view that cannot be one
        raise ReshardError(
            f"transformers computes tensors as it saves a {type(model).__name__}, and a refit copies rows: "
            f"publish it with save_pretrained ({type(error).__name__}: {error})"
        ) from error
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    wide = _kept_in_fp32(model)
    tensors: dict[str, SavedTensor] = {}
    for name, tensor in saved.items():
        parts = _parts(saving.runs(tensor), parameters)
        if not parts:
            raise ReshardError(
                f"transformers computes {name} as it saves a {type(model).__name__}, and a refit copies rows: "
                f"publish it with save_pretrained"
            )
        whole_dtype = "" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        is_linear = len(parts) == 1 and parts[0].parameter in linear
        in_fp32 = not whole_dtype and any(wide(part.parameter) for part in parts)
        tensors |= _apart(name, SavedTensor(shape or (1,), parts, not shape, whole_dtype, is_linear, in_fp32))
    return tensors


def _kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Return what tells of a parameter's name whether the class has it in fp32 where all else is in bf16, by the
    patterns with which it reads a checkpoint."""
    patterns = [str(pattern).replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()]
    wide = re.compile("|".join(patterns) or r"(?!)")  # which nothing matches
    return lambda name: wide.search(name) is not None


def _parts(
    runs: list[torch.Tensor], parameters: Mapping[int, tuple[str, tuple[int, ...]]]
) -> tuple[SavedPart, ...]:
    """Return the parts of a tensor of a checkpoint that has these views of parameters (names and shapes, by storage)
    one after the other along its first dim; none if one is no box of a parameter, or of several no whole rows."""
    parts: list[SavedPart] = []
    first = 0
    for run in runs:
        parameter, shape = parameters.get(storage_id(run), ("", ()))
        box = _box(shape, run) if parameter else None
        if box is None or (len(runs) > 1 and (run.ndim != len(shape) or box.lengths[1:] != shape[1:])):
            return ()
        parts.append(SavedPart(parameter, shape, box, first))
        first += run.shape[0] if len(runs) > 1 else 0
    return tuple(parts)


def _apart(name: str, saved: SavedTensor) -> dict[str, SavedTensor]:
    """Return a tensor of a checkpoint by name; one that has all experts of a layer as one view for each."""
    shape, [part, *others] = saved.shape, saved.parts
    offsets, lengths = part.box
    if others or len(shape) != 3 or lengths != shape or not _OF_EXPERTS.search(name):
        return {name: saved}
    return {
        f"{name}[{expert}]": saved._replace(
            shape=shape[1:],
            parts=(part._replace(box=Box((offsets[0] + expert, *offsets[1:]), (1, *shape[1:]))),),
        )
        for expert in range(shape[0])
    }


def places_of(saved: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Return the part of the model's parameters that each tensor of a checkpoint is, as a name or a view of one
    (`reshard.core.views`). Raises ReshardError for one that is joined of several, which is no view."""
    return {name: _place(name, tensor) for name, tensor in saved.items()}


def _place(name: str, saved: SavedTensor) -> str:
    shape, [(parameter, parameter_shape, (offsets, lengths), _), *others] = saved.shape, saved.parts
    if others:
        raise ReshardError(
            f"transformers saves {name} of rows of {listed({p.parameter: None for p in saved.parts})}, and a "
            "checkpoint of a trainer under FSDP is read only where each tensor is in one parameter: load it, and "
            "publish the model with save_pretrained"
        )
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


def _box(shape: tuple[int, ...], view: torch.Tensor) -> Box | None:
    """Return the box of a contiguous tensor of this shape that a view is, in the order of its elements; None if it is
    none."""
    is_whole = view.is_contiguous() and view.numel() == prod(shape)
    if is_whole and as_matrix(tuple(view.shape)) == as_matrix(shape):
        return whole(shape)
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
