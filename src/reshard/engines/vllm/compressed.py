"""Layers that vLLM loads from checkpoints in the format of ``compressed-tensors``, with a scale for each output channel, for
each published matrix, for each block, or, packed, for so many columns of a channel: codes and scales are made here of plain
weights, as that package makes them.

A scale is the largest magnitude that it is for, divided by 448 (e4m3), 127.5 (int8) or 7.5 (int4), in the weights' dtype; 0
becomes that dtype's epsilon. Codes are the weights divided by it, in that dtype too, clamped and rounded to the nearest, ties
to even (``calculate_qparams``, ``quantize`` and ``pack_to_int32`` of compressed-tensors 0.17). Where ranks of the engine hold
parts of what has one scale, the largest of theirs is found together.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import Compressed, experts_of, plain_templates, tensor_parallel

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
    for rows in _at_once(values):
        made[rows] = _codes(values[rows], scales[rows], codes)
    return made


def words_of(values: torch.Tensor, scales: torch.Tensor, codes: str, bits: int) -> torch.Tensor:
    """These codes in words of 32 bits ``[rows, words]``: the first in the lowest, each counted from the least number that is
    coded, and 0 where a row leaves some of its last word."""
    count, columns = values.shape
    each, width = 8 // bits, -(-columns * bits // 32)
    made = torch.empty((count, width), dtype=torch.int32, device=values.device)
    for rows in _at_once(values):
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
    scales = scales_of(_magnitudes(values, block), how.codes)
    if how.packed is not None:
        words = words_of(values, scales, how.codes, how.packed.bits)
        return {"_packed": words, "_scale": scales, "_shape": torch.tensor(values.shape)}
    codes = codes_of_blocks(values, scales, block, how.codes)
    return {"": codes, "_scale": scales.flatten() if how.strategy == "tensor" else scales}


def _at_once(values: torch.Tensor) -> list[slice]:
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


class Held(NamedTuple):
    """A part of a parameter: the published tensor's name and shape, the box of it, and the part's first row, experts below
    each other."""

    parameter: str
    name: str
    shape: tuple[int, ...]
    box: Box
    row: int


class Recipe:
    """How a layer's parameters, as vLLM would load them, are made of plain weights.

    `templates` are all its parameters as vLLM made them, `kept` the scales of its input, which come with a checkpoint and
    stay.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        how: Compressed,
        templates: Mapping[str, torch.Tensor],
        kept: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.module, self.how, self.templates, self.kept = name, module, how, templates, kept
        self.matrices = [
            (_matrix if how.packed is None else _packed_matrix)(name, module, how, templates, key)
            for key in how.weights
        ]
        # The matrices of which other tensor parallel ranks hold parts with the same scales.
        self.split: set[str] = set()
        # Of packed ones, the shapes of the published weights, by the names of the parameters that say them.
        self.shapes: dict[str, torch.Tensor] = {}

    @property
    def plain(self) -> list[str]:
        """The names of the parameters that a refit fills and that vLLM would load as they are, such as biases."""
        made = {*self.kept, *(name for one in self.matrices for name in (one.codes, one.scales))}
        made |= set(() if self.how.packed is None else self.how.packed.others)
        return [key for key in self.templates if key not in made]

    def share(self, held: Sequence[Held]) -> None:
        """Find out of the layer's parts of which matrices other ranks hold the rest. Raises ReshardError where parts of
        two published tensors would have one scale, and where ranks cannot find scales together."""
        for matrix in self.matrices:
            parts = [part for part in held if part.parameter == matrix.name]
            if matrix.scale_of_row is None:
                split = any(part.box.lengths[1] < part.shape[1] for part in parts)
                if split and any(part.box.lengths[0] < part.shape[0] for part in parts):
                    raise ReshardError(
                        f"{self.name}.{matrix.name} is split by rows and by columns, which a refit does not quantise: serve in bf16"
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
        if not self.split:
            return
        experts, (ranks, _) = experts_of(self.module), tensor_parallel()
        if experts is not None and experts.tp != ranks:
            raise ReshardError(
                f"{self.name} splits its experts over {experts.tp} ranks, not over the {ranks} of tensor parallelism, and those "
                f"cannot find scales together: pass enable_expert_parallel=True, or serve in bf16"
            )

    def _rows(self, matrix: Matrix) -> int:
        """The rows of a matrix, or of one of its experts."""
        of_plain = plain_templates(self.module) if self.how.packed is not None else self.templates
        return int(of_plain[matrix.name].shape[-2])

    def largest(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """For each scale the largest magnitude among the plain `values`, in fp32, by matrix."""
        found = {}
        for matrix in self.matrices:
            plain = values[matrix.name]
            largest = _magnitudes(plain, self.how.block or (1, plain.shape[-1])).float().flatten()
            if matrix.scale_of_row is not None:
                zeros = torch.zeros(prod(matrix.shape), dtype=torch.float32, device=plain.device)
                largest = zeros.scatter_reduce_(0, matrix.scale_of_row, largest, "amax")
            found[matrix.name] = largest
        return found

    def made(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The layer's parameters as vLLM would have loaded them, of plain `values` and the largest magnitudes of all
        ranks."""
        found = {key: values[key] for key in self.plain}
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
        if self.how.packed is not None:
            device = next(iter(values.values())).device
            for key in set(self.how.packed.others).intersection(self.templates):
                template = self.templates[key]
                blank = torch.zeros(template.shape, dtype=template.dtype)
                said = self.shapes.get(key, blank).to(device, template.dtype, copy=True)
                found[key] = alike(said, template)
        for key, value in self.kept.items():
            template = self.templates[key]
            found[key] = alike(value.expand(template.shape).clone(), template)
        return found


def alike(tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """The tensor, as a parameter of the template's kind."""
    tensor.__class__ = template.__class__
    tensor.__dict__ = dict(template.__dict__)
    return tensor


def find_together(vectors: Sequence[torch.Tensor], group: Any, timeout: float) -> None:
    """Let each element of these become the largest of all ranks in the group, which have as many in the same order. Waits
    for no longer than `timeout` seconds; on a GPU, enqueues it on the current stream."""
    if not vectors:
        return
    both = torch.cat(list(vectors))
    work = dist.all_reduce(both, dist.ReduceOp.MAX, group, async_op=True)
    if both.device.type == "cpu":
        work.wait(timedelta(seconds=timeout))
    else:
        work.wait()
    for vector, largest in zip(vectors, both.split([len(one) for one in vectors]), strict=True):
        vector.copy_(largest)


def _magnitudes(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
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


def refuse_parts_of_blocks(what: str, block: tuple[int, int], rows: int, parts: Sequence[Held]) -> None:
    """Raise ReshardError where a rank holds a part of what has one scale, or the blocks of a published tensor, in a matrix of
    so many `rows`, are not those of the matrix."""
    for part in parts:
        starts, lengths = part.box.offsets, part.box.lengths
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        within = any(
            start % size for start, size in zip((*starts, part.row % rows), (*block, block[0]), strict=True)
        )
        within |= any(
            end % size and end != length for end, size, length in zip(ends, block, part.shape, strict=True)
        )
        if within:
            raise ReshardError(
                f"{what} has a part of {part.name} that begins or ends within what has one scale, {block[0]} rows and {block[1]} "
                f"columns, which a refit does not quantise: serve at another tensor parallel size, or in bf16"
            )


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
