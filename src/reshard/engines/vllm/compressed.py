"""Layers that vLLM loads from checkpoints in the format of ``compressed-tensors``, with a scale for each output channel or
for each published matrix: codes and scales are made here of plain weights, as that package makes them.

A scale is the largest magnitude that it is for, divided by 448 (e4m3) or 127.5 (int8), in the weights' dtype; 0 becomes
that dtype's epsilon. Codes are the weights divided by it, in that dtype too, clamped and rounded to the nearest, ties to
even (``calculate_qparams`` and ``quantize`` of compressed-tensors 0.17). Where ranks of the engine hold parts of what has
one scale, the largest of theirs is found together.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import Compressed, experts_of, tensor_parallel

# Least and largest number that is coded, and what the largest magnitude is divided by.
RANGES = {torch.float8_e4m3fn: (-448.0, 448.0, 448.0), torch.int8: (-128.0, 127.0, 127.5)}
AT_ONCE = 16 << 20  # elements that are divided at a time


def scales_of(largest: torch.Tensor, codes: torch.dtype) -> torch.Tensor:
    """The scales of magnitudes, in their dtype, bf16 as a rule."""
    scales = largest / RANGES[codes][2]
    return torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)


def codes_of(values: torch.Tensor, scales: torch.Tensor, codes: torch.dtype) -> torch.Tensor:
    """What weights ``[rows, columns]`` become by scales ``[rows, 1]`` of the same dtype."""
    least, most, _ = RANGES[codes]
    made = torch.empty(values.shape, dtype=codes, device=values.device)
    rows = max(1, AT_ONCE // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        scaled = values[start : start + rows] / scales[start : start + rows]
        scaled += 0  # the zero point, which makes 0 of -0
        scaled.clamp_(least, most)
        made[start : start + rows] = (scaled.round_() if codes == torch.int8 else scaled).to(codes)
    return made


class Matrix(NamedTuple):
    """A parameter of codes by its name, that of its scales, whose shape as they are loaded, and the scale of each row,
    experts below each other; None where each row has its own."""

    name: str
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
        self.matrices = [_matrix(name, module, how, templates, key) for key in how.weights]
        # The matrices of which other tensor parallel ranks hold parts with the same scales.
        self.split: set[str] = set()

    @property
    def plain(self) -> list[str]:
        """The names of the parameters that a refit fills."""
        made = {*self.kept, *(matrix.scales for matrix in self.matrices)}
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
            if split:
                self.split.add(matrix.name)
        if not self.split:
            return
        experts, (ranks, _) = experts_of(self.module), tensor_parallel()
        if experts is not None and experts.tp != ranks:
            raise ReshardError(
                f"{self.name} splits its experts over {experts.tp} ranks, not over the {ranks} of tensor parallelism, and those "
                f"cannot find scales together: pass enable_expert_parallel=True, or serve in bf16"
            )

    def largest(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """For each scale the largest magnitude among the plain `values`, in fp32, by matrix."""
        found = {}
        for matrix in self.matrices:
            rows = values[matrix.name].flatten(0, -2)
            largest = torch.maximum(rows.amax(1), -rows.amin(1)).float()
            if matrix.scale_of_row is not None:
                zeros = torch.zeros(prod(matrix.shape), dtype=torch.float32, device=rows.device)
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
            plain = values[matrix.name]
            scales = scales_of(largest[matrix.name].to(plain.dtype), self.how.codes)
            of_rows = scales if matrix.scale_of_row is None else scales[matrix.scale_of_row]
            codes = codes_of(plain.flatten(0, -2), of_rows[:, None], self.how.codes).view(plain.shape)
            found[matrix.name] = alike(codes, self.templates[matrix.name])
            found[matrix.scales] = alike(scales.float().view(matrix.shape), self.templates[matrix.scales])
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


def _matrix(
    name: str, module: torch.nn.Module, how: Compressed, templates: Mapping[str, torch.Tensor], key: str
) -> Matrix:
    scales, rows = templates.get(f"{key}_scale"), prod(templates[key].shape[:-1])
    unknown = ReshardError(
        f"vLLM keeps the scales of {name}.{key} in another way than is known to a refit: serve in bf16"
    )
    if scales is None or scales.dtype != torch.float32 or templates[key].dtype != how.codes:
        raise unknown
    shape, count = tuple(scales.shape), prod(scales.shape)
    if how.strategy == "channel":
        if count != rows:
            raise unknown
        return Matrix(key, f"{key}_scale", shape, None)
    widths: Any = getattr(module, "logical_widths", None) or [rows // count] * count
    if len(widths) != count or sum(widths) != rows:
        raise unknown
    device = next(module.parameters()).device
    of_row = torch.repeat_interleave(torch.arange(count), torch.tensor(widths)).to(device)
    return Matrix(key, f"{key}_scale", shape, of_row)


def _refuse_shared_scales(what: str, scale_of_row: torch.Tensor, parts: Sequence[Held]) -> None:
    """Raise ReshardError where a scale is not that of one published tensor alone."""
    scales, names = scale_of_row.tolist(), dict[int, str]()
    for part in parts:
        first, last = scales[part.row], scales[part.row + part.box.lengths[0] - 1]
        if first != last or names.setdefault(first, part.name) != part.name:
            raise ReshardError(
                f"{what} has one scale for {part.name} and for others, or several for it: serve in bf16"
            )
