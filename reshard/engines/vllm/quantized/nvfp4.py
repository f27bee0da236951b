"""Layers that vLLM loads from checkpoints in nvfp4: a refit makes codes and both kinds of scales of
plain weights, as compressed-tensors or ModelOpt makes them (`reshard.quantization.nvfp4_torch`).

All that vLLM multiplies at once, such as q, k and v, or gate and up of an expert, has one global
scale.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.quantized.layers import Compressed, plain_templates
from reshard.engines.vllm.quantized.recipes import (
    Held,
    LayerQuantizer,
    parameter_like,
    refuse_parts_of_blocks,
    scheme_of,
)
from reshard.quantization.nvfp4 import GROUP, Nvfp4
from reshard.quantization.nvfp4_torch import Scaling, scaling_of
from reshard.quantization.nvfp4_torch import encode as encode_nvfp4


def scaling_of_layer(how: Compressed) -> Scaling:
    """Return the scaling of the package that writes what a layer is loaded from."""
    scheme = scheme_of(how)
    assert isinstance(scheme, Nvfp4)
    return scaling_of(scheme)


def check_columns(name: str, module: torch.nn.Module) -> None:
    """Raise ReshardError if a rank has a part of a group that shares a scale: vLLM then takes
    the scales of other columns."""
    for key, plain in plain_templates(module).items():
        if plain.shape[-1] % GROUP:
            raise ReshardError(
                f"{name}.{key} has {plain.shape[-1]} columns on this rank, which groups of {GROUP} do not "
                "divide: serve at another tensor parallel size, or in bf16"
            )


class Nvfp4Matrix(NamedTuple):
    """A matrix, or those of so many `experts`, by the name that its plain weights have, with the
    names of the parameters of its codes, scales and global scale, and its rows. An expert has one
    global scale, however often vLLM keeps it."""

    name: str
    parts: tuple[str, str, str]
    experts: int
    rows: int


class Nvfp4Quantizer(LayerQuantizer):
    """Makes a layer's codes and scales in nvfp4 of plain weights."""

    def find_matrices(self) -> None:
        check_columns(self.name, self.module)
        self.scaling = scaling_of_layer(self.how)
        self.matrices = []
        for key, plain in plain_templates(self.module).items():
            *experts, rows, columns = plain.shape
            codes_suffix, scale_suffix, global_scale_suffix = self.scaling.suffixes
            parts = key + codes_suffix, key + scale_suffix, key + global_scale_suffix
            codes, scales, global_scale = map(self.templates.get, parts)
            known = _is(codes, (*experts, rows, columns // 2), torch.uint8)
            known &= _is(scales, (*experts, rows, columns // GROUP), torch.float8_e4m3fn)
            if (
                not known
                or global_scale is None
                or global_scale.dtype != torch.float32
                or list(global_scale.shape[: len(experts)]) != experts
            ):
                raise ReshardError(
                    f"vLLM keeps the codes or scales of {self.name}.{key} in another way than is known to a "
                    "refit: serve in bf16"
                )
            self.matrices.append(Nvfp4Matrix(key, parts, prod(experts), rows))

    @property
    def encoded_names(self) -> set[str]:
        return {part for matrix in self.matrices for part in matrix.parts}

    def find_split_matrices(self, held: Sequence[Held]) -> None:
        for matrix in self.matrices:
            parts = [part for part in held if part.parameter == matrix.name]
            refuse_parts_of_blocks(f"{self.name}.{matrix.name}", (1, GROUP), matrix.rows, parts)
            if any(part.box.lengths != part.shape for part in parts):
                self.split_matrices.add(matrix.name)

    def largest_magnitudes(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_matrix = {}
        for matrix in self.matrices:
            apart = values[matrix.name].view(matrix.experts, -1)
            by_matrix[matrix.name] = torch.maximum(apart.amax(1), -apart.amin(1)).float()
        return by_matrix

    def encode(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        parameters = {}
        for matrix in self.matrices:
            plain = values[matrix.name]
            made = encode_nvfp4(plain.flatten(0, -2), largest[matrix.name].to(plain.dtype), self.scaling)
            for key, tensor in zip(matrix.parts, made.values(), strict=True):
                template = self.templates[key]
                if key == matrix.parts[2]:  # vLLM may keep it for each of the matrices that it has fused
                    tensor = tensor.view(-1, *[1] * (template.ndim - 1)).expand(template.shape).clone()
                parameters[key] = parameter_like(tensor.view(template.shape), template)
        return parameters


def _is(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tensor is not None and (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
