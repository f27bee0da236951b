"""The trace of vLLM's loader: its ``load_weights`` run on stand-ins for its parameters
(`reshard.engines.trace`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reshard.engines.deduplicated import ExpertLayer
from reshard.engines.trace import Canonical, Trace, storage_id, trace_load
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.quantized.layers import plain_templates
from reshard.engines.vllm.quantized.processing import bound_to, loading_templates
from reshard.engines.vllm.weights.served import without_adapters


def trace_model(model: torch.nn.Module, canonical: Canonical) -> Trace:
    """Return what ``model.load_weights`` would copy and fill, given canonical tensors (shape,
    dtype) without bytes.

    Raises ReshardError, naming the parameter, if it computes something instead of copying, and if
    it fails.
    """
    with without_adapters(model), _stand_ins(model) as parameters:
        return trace_load("vLLM", model.load_weights, canonical, parameters)  # type: ignore[arg-type]


def layer_fingerprint(model: torch.nn.Module, layer: ExpertLayer) -> tuple:
    """Return what decides how a layer is loaded: its modules, where their experts lie, and their
    parameters' classes, shapes, strides and dtypes."""
    sizes = tuple(layer.experts), tuple(map(len, layer.experts.values()))
    try:
        module = model.get_submodule(layer.prefix.removesuffix("."))
    except AttributeError:  # another rank's
        return sizes
    return (*sizes, *(_module_fingerprint(path, child) for path, child in module.named_modules()))


def _module_fingerprint(path: str, module: torch.nn.Module) -> tuple:
    templates = loading_templates(module)
    tensors = []
    for name, live in (*module._parameters.items(), *module._buffers.items()):
        if live is not None:
            template = templates.get(name, live)
            tensors.append((name, template.__class__, template.shape, template.stride(), template.dtype))
    return path, module.__class__, experts_of(module), tuple(tensors)


@contextmanager
def _stand_ins(model: torch.nn.Module) -> Iterator[dict[int, str]]:
    """Replace a model's tensors by stand-ins on the meta device; yields the stand-ins' names by
    `storage_id`.

    The model gets its tensors back at the end, also after an error.
    """
    names: dict[int, str] = {}
    saved = [
        (path, module, dict(module._parameters), dict(module._buffers))
        for path, module in model.named_modules()
    ]
    live_names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    stand_in_of: dict[int, torch.Tensor] = {}
    keep_alive: list[torch.Tensor] = []  # names are known by the addresses of storages
    try:
        for path, module, parameters, buffers in saved:
            templates, plain = loading_templates(module), plain_templates(module)
            for name in [name for name in parameters if name.startswith(tuple(plain))]:
                del module._parameters[name]  # codes, and what belongs to them
            for name, unquantized in plain.items():
                bound = bound_to(unquantized, module)
                names[storage_id(bound)] = f"{path}.{name}"
                module._parameters[name] = bound  # type: ignore[assignment]
                keep_alive.append(bound)
            for slots, tensors in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in tensors.items():
                    if name.startswith(tuple(plain)):
                        continue
                    # Tensors that vLLM derives while it processes have no template. One that it has
                    # packed into something else has nothing but its template.
                    template = templates.get(name, tensor)
                    if template is None:
                        continue
                    # One stand-in for all the names of a tensor.
                    stand_in = stand_in_of.get(id(tensor)) if tensor is not None else None
                    if stand_in is None:
                        stand_in = _on_meta(template)
                        if tensor is not None:
                            stand_in_of[id(tensor)] = stand_in
                        stand_in = bound_to(stand_in, module)
                        names[storage_id(stand_in)] = live_names.get(id(tensor), f"{path}.{name}")
                    slots[name] = stand_in  # type: ignore[assignment]
                    keep_alive.append(stand_in)
        yield names
    finally:
        for _, module, parameters, buffers in saved:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def _on_meta(template: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory, with the template's layout, class and attributes."""
    tensor = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device="meta")
    tensor.__class__ = template.__class__
    tensor.__dict__ = dict(template.__dict__)
    return tensor
