"""Layers that vLLM loads from checkpoints in nvfp4: a refit makes codes and both kinds of scales of plain weights, as
compressed-tensors or ModelOpt makes them (`reshard.quantization.nvfp4_torch`).

All that vLLM multiplies at once, such as q, k and v, or gate and up of an expert, has one global scale.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.layers import Compressed, plain_templates
from reshard.engines.vllm.recipes import Held, Recipe, alike, refuse_parts_of_blocks, scheme_of
from reshard.quantization.nvfp4 import GROUP, Nvfp4
from reshard.quantization.nvfp4_torch import Scaling, encode, scaling_of


def scaling_of_layer(how: Compressed) -> Scaling:
    """Return the scaling of the package that writes what a layer is loaded from."""
    scheme = scheme_of(how)
    assert isinstance(scheme, Nvfp4)
    return scaling_of(scheme)


def check_columns(name: str, module: torch.nn.Module) -> None:
    """Raise ReshardError where a rank has a part of what has one scale: vLLM takes other columns' scales then."""
    for key, plain in plain_templates(module).items():
        if plain.shape[-1] % GROUP:
            raise ReshardError(
                f"{name}.{key} has {plain.shape[-1]} columns on this rank, which groups of {GROUP} do not divide: serve at another "
                f"tensor parallel size, or in bf16"
            )


class Matrix(NamedTuple):
    """A matrix, or those of as many `experts`, by the name that its plain weights have, with the names of what it is loaded
    into: codes, scales, and the one scale, which each expert has, however often vLLM keeps it; and the rows of one."""

    name: str
    parts: tuple[str, str, str]
    experts: int
    rows: int


class Nvfp4Recipe(Recipe):
    """How a layer's codes and scales in nvfp4 are made of plain weights."""

    def find_matrices(self) -> None:
        check_columns(self.name, self.module)
        self.scaling = scaling_of_layer(self.how)
        self.matrices = []
        for key, plain in plain_templates(self.module).items():
            *experts, rows, columns = plain.shape
            codes_suffix, scale_suffix, global_scale_suffix = self.scaling.suffixes
            parts = key + codes_suffix, key + scale_suffix, key + global_scale_suffix
            codes, scales, one = map(self.templates.get, parts)
            known = _is(codes, (*experts, rows, columns // 2), torch.uint8)
            known &= _is(scales, (*experts, rows, columns // GROUP), torch.float8_e4m3fn)
            if (
                not known
                or one is None
                or one.dtype != torch.float32
                or list(one.shape[: len(experts)]) != experts
            ):
                raise ReshardError(
                    f"vLLM keeps the codes or scales of {self.name}.{key} in another way than is known to a refit: serve in bf16"
                )
            self.matrices.append(Matrix(key, parts, prod(experts), rows))

    @property
    def coded(self) -> set[str]:
        return {part for matrix in self.matrices for part in matrix.parts}

    def share_matrices(self, held: Sequence[Held]) -> None:
        for matrix in self.matrices:
            parts = [part for part in held if part.parameter == matrix.name]
            refuse_parts_of_blocks(f"{self.name}.{matrix.name}", (1, GROUP), matrix.rows, parts)
            if any(part.box.lengths != part.shape for part in parts):
                self.split.add(matrix.name)

    def largest(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for matrix in self.matrices:
            apart = values[matrix.name].view(matrix.experts, -1)
            found[matrix.name] = torch.maximum(apart.amax(1), -apart.amin(1)).float()
        return found

    def coded_of(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        found = {}
        for matrix in self.matrices:
            plain = values[matrix.name]
            made = encode(plain.flatten(0, -2), largest[matrix.name].to(plain.dtype), self.scaling)
            for key, tensor in zip(matrix.parts, made.values(), strict=True):
                template = self.templates[key]
                if (
                    key == matrix.parts[2]
                ):  # also where vLLM keeps it for each of the matrices that it has fused
                    tensor = tensor.view(-1, *[1] * (template.ndim - 1)).expand(template.shape).clone()
                found[key] = alike(tensor.view(template.shape), template)
        return found


def _is(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tensor is not None and (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
