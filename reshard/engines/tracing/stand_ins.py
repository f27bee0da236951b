"""Stand-ins without memory for a live model's tensors, on which its own loader is run for a trace
(`reshard.engines.tracing.trace`)."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.tracing.deduplicated import ExpertLayer
from reshard.models.row_runs import storage_id

Tensors = Mapping[str, torch.Tensor]


def no_tensors(module: torch.nn.Module) -> Tensors:
    """Return no tensors, for a module whose engine makes no others than it has."""
    return {}


def nothing(value: Any) -> bool:
    """Return False, for an engine whose loader makes nothing that is needed beside weights."""
    return False


def unbound(tensor: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Return the tensor as it is, for an engine whose loaders belong to no module."""
    return tensor


def layer_fingerprint(
    model: torch.nn.Module,
    layer: ExpertLayer,
    experts_of: Callable[[torch.nn.Module], Hashable],
    templates_of: Callable[[torch.nn.Module], Tensors] = no_tensors,
) -> tuple:
    """Return what decides how a layer is loaded: its modules, where their experts lie (`experts_of`),
    and their parameters' classes, shapes, strides and dtypes; see `stand_ins`."""
    sizes = tuple(layer.experts), tuple(map(len, layer.experts.values()))
    try:
        module = model.get_submodule(layer.prefix.removesuffix("."))
    except AttributeError:  # another rank's
        return sizes
    modules = []
    for path, child in module.named_modules():
        templates, tensors = templates_of(child), []
        for name, live in (*child._parameters.items(), *child._buffers.items()):
            if live is not None:
                template = templates.get(name, live)
                tensors.append((name, template.__class__, template.shape, template.stride(), template.dtype))
        modules.append((path, child.__class__, experts_of(child), tuple(tensors)))
    return (*sizes, *modules)


@contextmanager
def stand_ins(
    model: torch.nn.Module,
    templates_of: Callable[[torch.nn.Module], Tensors] = no_tensors,
    plain_of: Callable[[torch.nn.Module], Tensors] = no_tensors,
    bind: Callable[[torch.Tensor, torch.nn.Module], torch.Tensor] = unbound,
    read: Collection[str] = (),
    keeps: Callable[[Any], bool] = nothing,
) -> Iterator[dict[int, str]]:
    """Replace a model's tensors by stand-ins on the meta device; yields the stand-ins' names by
    `storage_id`.

    `templates_of` gives a module's tensors as they were made before any processing, as far as they
    differ from those that it has; `plain_of` the tensors that its loader writes into instead of
    those whose names begin alike; `bind` gives a stand-in the loader of its module. Buffers with the
    names `read`, whose numbers a loader looks up to know what to take, stay as they are. The model gets
    its tensors, modules and attributes back at the end, also after an error. What the loader has given it
    besides it `keeps` if that says so of the value.

    Raises ReshardError at the end for a stand-in in whose place a loader has put another tensor, and for
    tensors that it has made of weights and keeps beside them: a refit would bring neither.
    """
    names: dict[int, str] = {}
    attributes = [(path, module, _own_attributes(module)) for path, module in model.named_modules()]
    saved = [
        (path, module, dict(module._parameters), dict(module._buffers))
        for path, module in model.named_modules()
    ]
    live_names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    stand_in_of: dict[int, torch.Tensor] = {}
    keep_alive: list[torch.Tensor] = []  # names are known by the addresses of storages
    in_place: list[_InPlace] = []
    try:
        for path, module, parameters, buffers in saved:
            templates, plain = templates_of(module), plain_of(module)
            for name in [name for name in parameters if name.startswith(tuple(plain))]:
                del module._parameters[name]  # codes, and what belongs to them
            for name, unquantized in plain.items():
                bound = bind(unquantized, module)
                names[storage_id(bound)] = f"{path}.{name}"
                module._parameters[name] = bound  # type: ignore[assignment]
                keep_alive.append(bound)
                in_place.append(_InPlace(f"{path}.{name}", module._parameters, name, bound.untyped_storage()))
            for slots, tensors in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in tensors.items():
                    if name.startswith(tuple(plain)):
                        continue
                    # Tensors that an engine derives while it processes have no template. One that it has
                    # packed into something else has nothing but its template.
                    template = templates.get(name, tensor)
                    if template is None:
                        continue
                    if name in read and slots is module._buffers and tensor is not None:
                        names[storage_id(tensor)] = live_names.get(id(tensor), f"{path}.{name}")
                        continue
                    # One stand-in for all the names of a tensor.
                    stand_in = stand_in_of.get(id(tensor)) if tensor is not None else None
                    if stand_in is None:
                        stand_in = _on_meta(template)
                        if tensor is not None:
                            stand_in_of[id(tensor)] = stand_in
                        stand_in = bind(stand_in, module)
                        names[storage_id(stand_in)] = live_names.get(id(tensor), f"{path}.{name}")
                    slots[name] = stand_in  # type: ignore[assignment]
                    keep_alive.append(stand_in)
                    storage = stand_in.untyped_storage()
                    in_place.append(_InPlace(names[storage_id(stand_in)], slots, name, storage))
        yield names
        _check_in_place(in_place)
        _check_nothing_made(attributes, names)
    finally:
        for _, module, (own, modules) in attributes:
            made = {key: value for key, value in vars(module).items() if key not in own and keeps(value)}
            vars(module).clear()
            vars(module).update(own | made)
            module._modules.clear()
            module._modules.update(modules)
        for _, module, parameters, buffers in saved:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


class _InPlace(NamedTuple):
    """The storage of the stand-in that is `key` of a module's `slots`, for the tensor `name`."""

    name: str
    slots: Mapping[str, torch.Tensor | None]
    key: str
    storage: torch.UntypedStorage


def _check_in_place(stand_ins: Sequence[_InPlace]) -> None:
    """Raise ReshardError if a loader has put another tensor in the place of a stand-in: what it has copied before is
    not what it serves."""
    for name, slots, key, storage in stand_ins:
        now = slots.get(key)
        if now is not None and now.untyped_storage()._cdata != storage._cdata:
            raise ReshardError(
                f"the engine's loader puts another tensor in the place of {name}, which is not a plain copy: refit "
                f"does not support it"
            )


def _own_attributes(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own attributes, and the modules within it."""
    return dict(vars(module)), dict(module._modules)


def _check_nothing_made(
    before: Sequence[tuple[str, torch.nn.Module, tuple[dict[str, Any], dict[str, Any]]]],
    names: Collection[int],
) -> None:
    """Raise ReshardError if a loader has given a module a tensor that is not one of the stand-ins: it would be made of
    weights of before a refit."""
    for path, module, (own, _) in before:
        for key, value in vars(module).items():
            if value is own.get(key) or not isinstance(value, torch.Tensor):
                continue
            if value.is_meta and storage_id(value) not in names:
                name = f"{path}.{key}".removeprefix(".")
                raise ReshardError(
                    f"the engine's loader makes {name} of the weights once it has them, which a refit does not have "
                    f"made again: refit does not support it"
                )


def _on_meta(template: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory, with the template's layout, class and attributes."""
    tensor = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device="meta")
    tensor.__class__ = template.__class__
    tensor.__dict__ = dict(template.__dict__)
    return tensor
