"""The names of an adapter's matrices in PEFT's files and in Megatron checkpoints.

LoRA adds ``scale * B @ A`` to the weight ``[out, in]`` of a linear layer: A is ``[rank, in]``, B ``[out, rank]``.
"""

import re
from typing import NamedTuple

# What PEFT puts before the names of a transformers model's modules.
PEFT_PREFIX = "base_model.model."
A, B = "A", "B"
# Megatron-Bridge's adapters of the published parts of a fused layer (CanonicalLoRA), by the arrangement of a row.
CANONICAL = {"q": "adapter_q", "k": "adapter_k", "v": "adapter_v", "gate": "adapter_gate", "up": "adapter_up"}
# A key with a matrix of an adapter: the module, the adapter of a part or PEFT's name of the adapter, the matrix.
_BRIDGE = re.compile(
    r"(?P<module>.+)\.adapter\.(?:(?P<part>adapter_\w+)\.)?linear_(?P<matrix>in|out)\.weight"
)
_MCORE_BRIDGE = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.(?:(?P<adapter>[^.]+)\.)?weight")
_MATRICES = {"in": A, "out": B, "A": A, "B": B}


class MatrixKey(NamedTuple):
    """A key of a Megatron checkpoint, taken apart: `module` is the linear layer's, `matrix` ``A`` or
    ``B``; `part` names the published part of a fused layer and is empty for all of it; `adapter` is
    mcore-bridge's name of the adapter, None in Megatron-Bridge's keys."""

    module: str
    matrix: str
    part: str
    adapter: str | None


def parse_key(key: str) -> MatrixKey | None:
    """Return what a key says, or None if it is not a matrix of an adapter.

    >>> parse_key("decoder.layers.mlp.linear_fc1.adapter.linear_in.weight")
    MatrixKey(module='decoder.layers.mlp.linear_fc1', matrix='A', part='', adapter=None)
    >>> parse_key("decoder.layers.mlp.linear_fc2.lora_B.default.weight")
    MatrixKey(module='decoder.layers.mlp.linear_fc2', matrix='B', part='', adapter='default')
    """
    match = _BRIDGE.fullmatch(key)
    if match is not None:
        return MatrixKey(match["module"], _MATRICES[match["matrix"]], match["part"] or "", None)
    match = _MCORE_BRIDGE.fullmatch(key)
    if match is not None:
        return MatrixKey(match["module"], _MATRICES[match["matrix"]], "", match["adapter"] or "")
    return None


def megatron_name(module: str, matrix: str, part: str = "", adapter: str | None = None) -> str:
    """Return a matrix's name in a Megatron model, which `parse_key` takes apart."""
    if adapter is not None:
        return f"{module}.lora_{matrix}.{adapter}.weight" if adapter else f"{module}.lora_{matrix}.weight"
    within = f"{part}." if part else ""
    return f"{module}.adapter.{within}linear_{'in' if matrix == A else 'out'}.weight"


def peft_name(weight: str, matrix: str) -> str:
    """Return PEFT's name of a matrix of a published weight. Of a weight that is some rows of a
    tensor, B is the same rows of the tensor's B, and A is the tensor's.

    >>> peft_name("model.layers.0.self_attn.q_proj.weight", "A")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    >>> peft_name("q_proj.weight[0:8 in 16]", "B")
    'base_model.model.q_proj.lora_B.weight[0:8 in 16]'
    """
    rows = f"[{weight.partition('[')[2]}" if "[" in weight and matrix == B else ""
    return f"{PEFT_PREFIX}{module_of(weight)}.lora_{matrix}.weight{rows}"


def module_of(weight: str) -> str:
    """Return the module of a published weight."""
    return weight.partition("[")[0].removesuffix(".weight")
