"""Layers that vLLM loads from checkpoints in the format of ``compressed-tensors``, with a scale for each output channel, for
each published matrix, for each block, or, packed, for so many columns of a channel: codes and scales are made here of plain
weights, as that package makes them.

A scale is the largest magnitude that it is for, divided by 448 (e4m3), 127.5 (int8) or 7.5 (int4), in the weights' dtype; 0
becomes that dtype's epsilon. Codes are the weights divided by it, in that dtype too, clamped and rounded to the nearest, ties
to even (``calculate_qparams``, ``quantize`` and ``pack_to_int32`` of compressed-tensors 0.17). Where ranks of the engine hold
parts of what has one scale, the largest of theirs is found together.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.layers import Compressed, plain_templates
from reshard.engines.vllm.recipes import Held, Recipe, alike, refuse_parts_of_blocks

# Least and largest number that is coded, and what the largest magnitude is divided by.
RANGES = {
    "float8_e4m3fn": (-448.0, 448.0, 448.0),
    "int8": (-128.0, 127.0, 127.5),
    "int4": (-8.0, 7.0, 7.5),
}
DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.int8,
}  # before they are packed
AT_ONCE = 16 << 20  # elements that are divided at a time


def scales_of(largest: torch.Tensor, codes: str) -> torch.Tensor:
    """The scales of magnitudes, in their dtype, bf16 as a rule."""
    scales = largest / RANGES[codes][2]
    return torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)


def codes_of(values: torch.Tensor, scales: torch.Tensor, codes: str) -> torch.Tensor:
    """What weights ``[rows, columns]`` become by scales ``[rows, groups]`` of the same dtype, each for as many columns."""
    made = torch.empty(values.shape, dtype=DTYPES[codes], device=values.device)
    for rows in at_once(values):
        made[rows] = _codes(values[rows], scales[rows], codes)
    return made


def words_of(values: torch.Tensor, scales: torch.Tensor, codes: str, bits: int) -> torch.Tensor:
    """These codes in words of 32 bits ``[rows, words]``: the first in the lowest, each counted from the least number that is
    coded, and 0 where a row leaves some of its last word."""
    count, columns = values.shape
    each, width = 8 // bits, -(-columns * bits // 32)
    made = torch.empty((count, width), dtype=torch.int32, device=values.device)
    for rows in at_once(values):
        unsigned = (_codes(values[rows], scales[rows], codes) + (1 << (bits - 1))).view(torch.uint8)
        unsigned = torch.nn.functional.pad(unsigned, (0, width * 4 * each - columns))
        packed = unsigned[:, ::each].clone()
        for n in range(1, each):
            packed |= unsigned[:, n::each] << (n * bits)
        made[rows] = packed.view(torch.int32)
    return made


def stored_as(values: torch.Tensor, how: Compressed) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a weight ``[rows, columns]``, by the ends of names, with scales in the weight's dtype."""
    rows, columns = values.shape
    block = (rows, columns) if how.strategy == "tensor" else how.block or (1, columns)
    scales = scales_of(magnitudes(values, block), how.codes)
    if how.packed is not None:
        words = words_of(values, scales, how.codes, how.packed.bits)
        return {"_packed": words, "_scale": scales, "_shape": torch.tensor(values.shape)}
    codes = codes_of_blocks(values, scales, block, how.codes)
    return {"": codes, "_scale": scales.flatten() if how.strategy == "tensor" else scales}


def at_once(values: torch.Tensor) -> list[slice]:
    """Runs of rows that are divided at a time."""
    step = max(1, AT_ONCE // max(1, values.shape[1]))
    return [slice(start, start + step) for start in range(0, len(values), step)]


def _codes(values: torch.Tensor, scales: torch.Tensor, codes: str) -> torch.Tensor:
    least, most, _ = RANGES[codes]
    scaled = values.unflatten(1, (scales.shape[1], -1)) / scales[:, :, None]
    scaled += 0  # the zero point, which makes 0 of -0
    scaled.clamp_(least, most)
    rounded = scaled.round_() if DTYPES[codes] == torch.int8 else scaled
    return rounded.to(DTYPES[codes]).view(values.shape)


class Matrix(NamedTuple):
    """A parameter of plain weights by its name, with the names of those of codes and of their scales, whose shape as they are
    made; and the scale of each row, experts below each other, None where each row or block has its own."""

    name: str
    codes: str
    scales: str
    shape: tuple[int, ...]
    scale_of_row: torch.Tensor | None


class CompressedRecipe(Recipe):
    """How a layer's codes and scales are made of plain weights, where there is one kind of scales."""

    def find_matrices(self) -> None:
        find = _matrix if self.how.packed is None else _packed_matrix
        self.matrices = [
            find(self.name, self.module, self.how, self.templates, key) for key in self.how.weights
        ]
        # Of packed ones, the shapes of the published weights, by the names of the parameters that say them.
        self.shapes: dict[str, torch.Tensor] = {}

    @property
    def coded(self) -> set[str]:
        return {name for one in self.matrices for name in (one.codes, one.scales)}

    def share_matrices(self, held: Sequence[Held]) -> None:
        for matrix in self.matrices:
            parts = [part for part in held if part.parameter == matrix.name]
            if matrix.scale_of_row is None:
                split = any(part.box.lengths[1] < part.shape[1] for part in parts)
                if split and any(part.box.lengths[0] < part.shape[0] for part in parts):
                    raise ReshardError(
                        f"{self.name}.{matrix.name} is split by rows and by columns, which a refit does not quantize: serve in bf16"
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
                self.split.add(matrix.name)

    def _rows(self, matrix: Matrix) -> int:
        """The rows of a matrix, or of one of its experts."""
        of_plain = plain_templates(self.module) if self.how.packed is not None else self.templates
        return int(of_plain[matrix.name].shape[-2])

    def largest(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for matrix in self.matrices:
            plain = values[matrix.name]
            largest = magnitudes(plain, self.how.block or (1, plain.shape[-1])).float().flatten()
            if matrix.scale_of_row is not None:
                zeros = torch.zeros(prod(matrix.shape), dtype=torch.float32, device=plain.device)
                largest = zeros.scatter_reduce_(0, matrix.scale_of_row, largest, "amax")
            found[matrix.name] = largest
        return found

    def coded_of(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        found = {}
        for matrix in self.matrices:
            plain, codes = values[matrix.name], self.how.codes
            rows = plain.flatten(0, -2)
            scales = scales_of(largest[matrix.name].to(plain.dtype), codes)
            if self.how.packed is not None:
                words = words_of(rows, scales.view(len(rows), -1), codes, self.how.packed.bits)
                for key, made in ((matrix.codes, words), (matrix.scales, scales)):
                    made = made.view(*plain.shape[:-1], -1)
                    made = made.mT.contiguous() if self.how.packed.turned else made
                    found[key] = alike(made, self.templates[key])
                continue
            if self.how.block is not None:
                made = codes_of_blocks(plain, scales.view(matrix.shape), self.how.block, codes)
            else:
                of_rows = scales if matrix.scale_of_row is None else scales[matrix.scale_of_row]
                made = codes_of(rows, of_rows[:, None], codes).view(plain.shape)
            found[matrix.codes] = alike(made, self.templates[matrix.codes])
            found[matrix.scales] = alike(scales.float().view(matrix.shape), self.templates[matrix.scales])
        for key, shapes in self.shapes.items():
            template, device = self.templates[key], next(iter(values.values())).device
            found[key] = alike(shapes.to(device, template.dtype, copy=True), template)
        return found


def magnitudes(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest of each block of matrices ``[..., rows, columns]``, where the last ones may be smaller: ``[..., blocks,
    blocks]``."""
    (rows, columns), (height, width) = values.shape[-2:], block
    if rows % height or columns % width:
        values = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    blocks = values.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    return torch.maximum(blocks.amax((-3, -1)), -blocks.amin((-3, -1)))


def codes_of_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], codes: str
) -> torch.Tensor:
    """What matrices ``[..., rows, columns]`` become by scales ``[..., blocks, blocks]``."""
    rows, columns = values.shape[-2:]
    if columns % block[1]:
        values = torch.nn.functional.pad(values, (0, -columns % block[1]))
    of_rows = scales.repeat_interleave(block[0], -2)[..., :rows, :]
    made = codes_of(values.flatten(0, -2), of_rows.flatten(0, -2), codes).view(values.shape)
    return made[..., :columns].contiguous()


def _packed_matrix(
    name: str, module: torch.nn.Module, how: Compressed, templates: Mapping[str, torch.Tensor], key: str
) -> Matrix:
    assert how.packed is not None
    plain = plain_templates(module)[key]
    codes, scales = f"{key}_packed", f"{key}_scale"
    *rows, columns = plain.shape
    groups = 1 if how.block is None else columns // how.block[1]
    wanted = {codes: -(-columns * how.packed.bits // 32), scales: groups}
    for one, width in wanted.items():
        shape = (*rows[:-1], width, rows[-1]) if how.packed.turned else (*rows, width)
        dtype = torch.int32 if one == codes else plain.dtype
        if one not in templates or (templates[one].shape, templates[one].dtype) != (shape, dtype):
            raise ReshardError(
                f"vLLM keeps the packed codes or scales of {name}.{key} in another way than is known to a refit: serve in bf16"
            )
    return Matrix(key, codes, scales, (*rows, groups), None)


def _shapes(
    matrix: Matrix, templates: Mapping[str, torch.Tensor], parts: Sequence[Held]
) -> dict[str, torch.Tensor]:
    """The shapes of published weights that a layer keeps beside a packed matrix, where several have one place that of the one
    whose name comes last: so vLLM leaves them when it loads a checkpoint, and nobody reads them."""
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
) -> Matrix:
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
        return Matrix(key, key, f"{key}_scale", shape, None)
    if how.strategy == "channel":
        if count != rows:
            raise unknown
        return Matrix(key, key, f"{key}_scale", shape, None)
    widths: Any = getattr(module, "logical_widths", None) or [rows // count] * count
    if len(widths) != count or sum(widths) != rows:
        raise unknown
    device = next(module.parameters()).device
    of_row = torch.repeat_interleave(torch.arange(count), torch.tensor(widths)).to(device)
    return Matrix(key, key, f"{key}_scale", shape, of_row)


def _refuse_shared_scales(what: str, scale_of_row: torch.Tensor, parts: Sequence[Held]) -> None:
    """Raise ReshardError where a scale is not that of one published tensor alone."""
    scales, names = scale_of_row.tolist(), dict[int, str]()
    for part in parts:
        first, last = scales[part.row], scales[part.row + part.box.lengths[0] - 1]
        if first != last or names.setdefault(first, part.name) != part.name:
            raise ReshardError(
                f"{what} has one scale for {part.name} and for others, or several for it: serve in bf16"
            )
