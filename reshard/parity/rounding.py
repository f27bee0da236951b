"""Round weights and activations in the modules of a plain model as an engine that serves quantized
weights does.

How far that moves a model's logprobs depends on the model, so it is measured: `rounded` makes an
ordinary system round like such an engine, without its kernels. It is an estimate of size, not of
bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from reshard.models.model import Model
from reshard.parity.systems.base import ForwardSystem
from reshard.quantization import nvfp4
from reshard.quantization.fp8_blocks import E4M3_MAX

FP4 = torch.tensor(nvfp4.MAGNITUDES)
# Largest code of a kind, and how many neighbors share a scale where the whole row does not.
LARGEST = {"fp8": E4M3_MAX, "int8": 127.0, "int4": 7.0, "fp4": nvfp4.E2M1_MAX}
GROUPS = {"fp8": 0, "int8": 0, "int4": 128, "fp4": nvfp4.GROUP}


@dataclass(frozen=True)
class Rounding:
    """Codes that weights, and activations if not None, are rounded to. `group` neighbors share a
    scale (default: the kind's)."""

    weights: str
    activations: str | None
    group: int | None = None

    def __str__(self) -> str:
        return f"{self.weights} weights" + (
            f" and {self.activations} activations" if self.activations else ""
        )


def rounding_of(model: Model, quantization: str | None) -> Rounding:
    """Return the rounding of an engine that is started with `quantization`, or by the model's
    config. An unknown quantization is taken for fp8."""
    config = model.config.get("quantization_config")
    declared = dict(config) if isinstance(config, Mapping) else {}
    groups = declared.get("config_groups")
    if quantization is None and isinstance(groups, Mapping) and groups:
        group = next(iter(groups.values()))
        weights, inputs = _kind(group.get("weights")), group.get("input_activations")
        size = (group.get("weights") or {}).get("group_size")
        return Rounding(weights or "fp8", _kind(inputs) if inputs else None, size)
    name = (quantization or str(declared.get("quant_algo") or declared.get("quant_method") or "")).lower()
    kind = next((kind for kind, words in _WORDS.items() if any(word in name for word in words)), "fp8")
    return Rounding(kind, None if "weight_only" in name or kind in ("int4", "fp4") else kind)


_WORDS = {"int8": ("int8", "w8a8_int"), "int4": ("int4", "w4a16", "awq", "gptq"), "fp4": ("fp4",)}


def _kind(arguments: Any) -> str | None:
    """Return the kind of codes of a group in a compressed-tensors config, or None if unknown."""
    if not isinstance(arguments, Mapping):
        return None
    kind = f"{'fp' if arguments.get('type') == 'float' else 'int'}{arguments.get('num_bits')}"
    return kind if kind in LARGEST else None


def round_to(values: torch.Tensor, kind: str, group: int | None = None) -> torch.Tensor:
    """Values rounded to codes with a scale for each row, or for each group of neighbors in it.

    >>> round_to(torch.tensor([[7.0, 3.4, -1.6]]), "int4")
    tensor([[ 7.,  3., -2.]])
    """
    size, width = group or GROUPS[kind], values.shape[-1]
    grouped = values.float()
    if size and width % size == 0:
        grouped = grouped.unflatten(-1, (width // size, size))
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST[kind]
    codes = grouped / scale
    if kind == "fp8":
        codes = codes.to(torch.float8_e4m3fn).float()
    elif kind == "fp4":
        middle = (FP4[1:] + FP4[:-1]).to(codes.device) / 2
        codes = FP4.to(codes.device)[torch.bucketize(codes.abs(), middle)] * codes.sign()
    else:
        codes = codes.round()
    return (codes * scale).reshape(values.shape).to(values.dtype)


@contextmanager
def rounded(system: ForwardSystem, rounding: Rounding) -> Iterator[None]:
    """Let the system's linear layers and experts round their inputs while the context is open.
    Their weights are rounded for good, so that the system must not be used otherwise."""
    handles = []
    for module in system.layers_to_round():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 1:
                parameter.data.copy_(round_to(parameter.data, rounding.weights, rounding.group))
        if rounding.activations is not None:
            handles.append(module.register_forward_pre_hook(_rounding_inputs(rounding.activations)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rounding_inputs(kind: str) -> Any:
    def hook(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *rest = inputs
        return (round_to(first, kind), *rest) if isinstance(first, torch.Tensor) else inputs

    return hook
