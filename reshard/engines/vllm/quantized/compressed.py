"""Layers that vLLM loads from checkpoints in the format of ``compressed-tensors``, in fp8, int8 or
packed codes: a refit makes what they are loaded from of plain weights, by the arithmetic of
`reshard.quantization`.

Where ranks of the engine hold parts of what has one scale, they find the largest of their
magnitudes together.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

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
from reshard.quantization import channels_torch, int_groups_torch
from reshard.quantization.channels_torch import DTYPES, encode_blocks, encode_rows, magnitudes, scales_of
from reshard.quantization.int_groups import IntGroups, words
from reshard.quantization.int_groups_torch import encode_words
from reshard.quantization.nvfp4 import Nvfp4


def stored_as(values: torch.Tensor, how: Compressed) -> dict[str, torch.Tensor]:
    """Return what a layer's checkpoint has of a weight ``[rows, columns]``, by the ends of names,
    with scales in its dtype."""
    scheme = scheme_of(how)
    assert not isinstance(scheme, Nvfp4)
    if isinstance(scheme, IntGroups):
        return int_groups_torch.encode(values, scheme)
    return channels_torch.encode(values, scheme)


class CompressedMatrix(NamedTuple):
    """A matrix of plain weights by the name of its parameter, with the names of the parameters of
    its codes and scales, the shape of the scales as they are made, and the scale of each row, with
    experts below each other; None if each row or block has its own."""

    name: str
    codes: str
    scales: str
    shape: tuple[int, ...]
    scale_of_row: torch.Tensor | None


class CompressedQuantizer(LayerQuantizer):
    """Makes a layer's codes and scales of plain weights, where there is one kind of scales."""

    def find_matrices(self) -> None:
        find = _matrix if self.how.packed is None else _packed_matrix
        self.matrices = [
            find(self.name, self.module, self.how, self.templates, key) for key in self.how.weights
        ]
        # The shapes of published weights whose codes are packed, by the names of the parameters
        # that hold them.
        self.shapes: dict[str, torch.Tensor] = {}

    @property
    def encoded_names(self) -> set[str]:
        return {name for matrix in self.matrices for name in (matrix.codes, matrix.scales)}

    def find_split_matrices(self, held: Sequence[Held]) -> None:
        for matrix in self.matrices:
            parts = [part for part in held if part.parameter == matrix.name]
            if matrix.scale_of_row is None:
                split = any(part.box.lengths[1] < part.shape[1] for part in parts)
                if split and any(part.box.lengths[0] < part.shape[0] for part in parts):
                    raise ReshardError(
                        f"{self.name}.{matrix.name} is split by rows and by columns, which a refit does not "
                        "quantize: serve in bf16"
                    )
            else:
                split = any(part.box.lengths != part.shape for part in parts)
                _refuse_shared_scales(f"{self.name}.{matrix.name}", matrix.scale_of_row, parts)
            if self.how.packed is not None:
                self.shapes |= _shapes(matrix, self.templates, parts)
            if self.how.block is not None:
                rows = self._rows(matrix)
                refuse_parts_of_blocks(f"{self.name}.{matrix.name}", self.how.block, rows, parts)
            elif split:
                self.split_matrices.add(matrix.name)

    def _rows(self, matrix: CompressedMatrix) -> int:
        """Return the rows of a matrix, or of one of its experts."""
        of_plain = plain_templates(self.module) if self.how.packed is not None else self.templates
        return int(of_plain[matrix.name].shape[-2])

    def largest_magnitudes(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_matrix = {}
        for matrix in self.matrices:
            plain = values[matrix.name]
            largest = magnitudes(plain, self.how.block or (1, plain.shape[-1])).float().flatten()
            if matrix.scale_of_row is not None:
                zeros = torch.zeros(prod(matrix.shape), dtype=torch.float32, device=plain.device)
                largest = zeros.scatter_reduce_(0, matrix.scale_of_row, largest, "amax")
            by_matrix[matrix.name] = largest
        return by_matrix

    def encode(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        parameters = {}
        for matrix in self.matrices:
            plain, codes = values[matrix.name], self.how.codes
            rows = plain.flatten(0, -2)
            scales = scales_of(largest[matrix.name].to(plain.dtype), codes)
            if self.how.packed is not None:
                packed = encode_words(rows, scales.view(len(rows), -1), codes, self.how.packed.bits)
                for key, made in ((matrix.codes, packed), (matrix.scales, scales)):
                    made = made.view(*plain.shape[:-1], -1)
                    made = made.mT.contiguous() if self.how.packed.turned else made
                    parameters[key] = parameter_like(made, self.templates[key])
                continue
            if self.how.block is not None:
                made = encode_blocks(plain, scales.view(matrix.shape), self.how.block, codes)
            else:
                row_scales = scales if matrix.scale_of_row is None else scales[matrix.scale_of_row]
                made = encode_rows(rows, row_scales[:, None], codes).view(plain.shape)
            parameters[matrix.codes] = parameter_like(made, self.templates[matrix.codes])
            parameters[matrix.scales] = parameter_like(
                scales.float().view(matrix.shape), self.templates[matrix.scales]
            )
        for key, shapes in self.shapes.items():
            template, device = self.templates[key], next(iter(values.values())).device
            parameters[key] = parameter_like(shapes.to(device, template.dtype, copy=True), template)
        return parameters


def _packed_matrix(
    name: str, module: torch.nn.Module, how: Compressed, templates: Mapping[str, torch.Tensor], key: str
) -> CompressedMatrix:
    assert how.packed is not None
    plain = plain_templates(module)[key]
    codes, scales = f"{key}_packed", f"{key}_scale"
    *rows, columns = plain.shape
    groups = 1 if how.block is None else columns // how.block[1]
    for key_of_part, width in ((codes, words(columns, how.packed.bits)), (scales, groups)):
        shape = (*rows[:-1], width, rows[-1]) if how.packed.turned else (*rows, width)
        dtype = torch.int32 if key_of_part == codes else plain.dtype
        template = templates.get(key_of_part)
        if template is None or (template.shape, template.dtype) != (shape, dtype):
            raise ReshardError(
                f"vLLM keeps the packed codes or scales of {name}.{key} in another way than is known to a "
                "refit: serve in bf16"
            )
    return CompressedMatrix(key, codes, scales, (*rows, groups), None)


def _shapes(
    matrix: CompressedMatrix, templates: Mapping[str, torch.Tensor], parts: Sequence[Held]
) -> dict[str, torch.Tensor]:
    """Return the shapes of published weights that a layer keeps with a packed matrix.

    Where several weights have one place for them, it holds that of the weight whose name comes
    last: so vLLM leaves it when it loads a checkpoint. Nobody reads these.
    """
    key = f"{matrix.name}_shape"
    if key not in templates:
        return {}
    made = torch.zeros(templates[key].shape, dtype=torch.int64)
    rows = prod(matrix.shape[:-1]) // max(1, len(made.view(-1, 2)))
    for part in sorted(parts, key=lambda part: part.name):
        made.view(-1, 2)[part.row // rows] = torch.tensor(part.shape)
    return {key: made}


def _matrix(
    name: str, module: torch.nn.Module, how: Compressed, templates: Mapping[str, torch.Tensor], key: str
) -> CompressedMatrix:
    scales, rows = templates.get(f"{key}_scale"), prod(templates[key].shape[:-1])
    unknown = ReshardError(
        f"vLLM keeps the scales of {name}.{key} in another way than is known to a refit: serve in bf16"
    )
    if scales is None or scales.dtype != torch.float32 or templates[key].dtype != DTYPES[how.codes]:
        raise unknown
    shape, count = tuple(scales.shape), prod(scales.shape)
    if how.block is not None:
        blocks = (-(-n // size) for n, size in zip(templates[key].shape[-2:], how.block, strict=True))
        if shape != (*templates[key].shape[:-2], *blocks):
            raise unknown
        return CompressedMatrix(key, key, f"{key}_scale", shape, None)
    if how.strategy == "channel":
        if count != rows:
            raise unknown
        return CompressedMatrix(key, key, f"{key}_scale", shape, None)
    widths: Any = getattr(module, "logical_widths", None) or [rows // count] * count
    if len(widths) != count or sum(widths) != rows:
        raise unknown
    device = next(module.parameters()).device
    scale_of_row = torch.repeat_interleave(torch.arange(count), torch.tensor(widths)).to(device)
    return CompressedMatrix(key, key, f"{key}_scale", shape, scale_of_row)


def _refuse_shared_scales(what: str, scale_of_row: torch.Tensor, parts: Sequence[Held]) -> None:
    """Raise ReshardError if a scale belongs to several published tensors, or a tensor has
    several."""
    scales, names = scale_of_row.tolist(), dict[int, str]()
    for part in parts:
        first, last = scales[part.row], scales[part.row + part.box.lengths[0] - 1]
        if first != last or names.setdefault(first, part.name) != part.name:
            raise ReshardError(
                f"{what} has one scale for {part.name} and for others, or several for it: serve in bf16"
            )
