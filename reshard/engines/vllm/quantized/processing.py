"""vLLM's loading of a layer's parameters, and its processing of them into what the layer serves from.

None of this is part of vLLM's interface; it is for vLLM 0.24 to 0.33, as is `reshard.engines.vllm.compat`.
"""

from typing import Any

from reshard.core.extras import importing
from reshard.engines.vllm.compat import in_config, known

with importing("vllm"):
    import torch

# The attribute in which a kernel of the build for the CPU keeps packed weights, which are no
# tensors of torch.
HANDLE = "dnnl_handler"
PROCESSED = "_already_called_process_weights_after_loading"


def loading_templates(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name, as vLLM made them before any processing, on
    the meta device; only those that it noted."""
    with known("does not note how its parameters are loaded"):
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        info = LAYERWISE_INFO.get(module)
        templates: dict[str, torch.Tensor] = {}
        for noted in info.restore_metadata if info is not None else ():
            templates |= noted
        return templates


def bound_to(tensor: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Return a template whose loader is the method of `module` that it was made with."""
    with known("binds a parameter's loader in another way"):
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        bound = restore_layer_refs(tensor, module)
        loader: Any = getattr(bound, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            # The loader of a layer that is quantized while it is loaded: it waits for all of the
            # layer's weights.
            loader = loader.__wrapped__
            setattr(bound, "weight_loader", loader)  # noqa: B010
        return bound


def loaded_aside() -> frozenset[str]:
    """Return the names of tensors that vLLM leaves alone when it loads and processes a layer
    again."""
    with known("does not say what it keeps while it loads a layer anew"):
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

        return frozenset(SKIP_TENSORS)


def processing_objects(module: torch.nn.Module) -> list[Any]:
    """Return a layer and what holds its kernels: the objects that vLLM's processing of its weights
    writes to."""
    owners = [module.quant_method]
    if getattr(module, "scheme", None) is not None:
        owners.append(module.scheme)
    kernels = [
        value
        for owner in owners
        for value in vars(owner).values()
        if type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__")
    ]
    return [
        module,
        *owners,
        *(kernel for kernel in kernels if not isinstance(kernel, torch.nn.Module | type)),
    ]


def process(module: torch.nn.Module, config: Any) -> None:
    """Let vLLM process a layer's parameters, which are as they were loaded, into what it serves
    from, under its ``VllmConfig``.

    The processing starts anew, as in vLLM's own ``reload/layerwise.py``.
    """
    vars(module).pop(PROCESSED, None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with torch.no_grad(), in_config(config):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]
    finally:
        torch.set_default_dtype(before)


def scales_in(config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a ``FusedMoEQuantConfig`` holds, by name: kernels of experts read
    scales from it."""
    tensors: dict[str, torch.Tensor] = {}
    for side, description in (vars(config) if hasattr(config, "__dict__") else {}).items():
        if type(description).__name__ == "FusedMoEQuantDesc":
            named = vars(description).items()
            tensors |= {f"{side}.{key}": value for key, value in named if isinstance(value, torch.Tensor)}
    return tensors


def multiplied(handle: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights ``[inputs, outputs]`` times their scales, in `dtype`, behind a handle of
    the CPU's kernels, which hides them."""
    with known("multiplies in another way on the CPU"):
        from vllm import _custom_ops

        identity = torch.eye(handle.k, dtype=torch.int8)
        product = torch.empty((handle.k, handle.n), dtype=dtype)
        _custom_ops.onednn_scaled_mm(handle, identity, product, torch.ones(handle.k, 1), None, None, None)
        return product
