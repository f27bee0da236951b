"""Layers that vLLM loads from checkpoints in nvfp4: numbers of 4 bits (e2m1) with a scale in e4m3 for 16 columns of a row, and
one in fp32 for all that vLLM multiplies at once, such as q, k and v, or gate and up of an expert.

The arithmetic is that of compressed-tensors 0.17 (``generate_gparam``, ``calculate_qparams`` and ``NVFP4PackedCompressor``).
With the largest magnitude of all, in the weights' dtype, the one scale is ``2688 / largest``, a divisor in that dtype; a
scale of 16 columns is ``one * (their largest / 6)``, rounded to e4m3, where 0 becomes 1/8; and a code is ``weight / (scale /
one)`` in fp32, clamped to 6 and rounded to the nearest, ties to even codes, where negative numbers keep their sign.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import Compressed, plain_templates
from reshard.engines.vllm.compressed import at_once, magnitudes
from reshard.engines.vllm.recipes import Held, Recipe, alike, refuse_parts_of_blocks

GROUP = 16  # columns that share a scale
E2M1_MAX, E4M3_MAX = 6.0, 448.0
LEAST_SCALE = 0.125  # what takes the place of 0
# What a magnitude has to be greater than to have the second code, the third and so on; where the lower of two codes is odd,
# what lies between them goes to the higher one.
EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def one_scale(largest: torch.Tensor) -> torch.Tensor:
    """The divisors, in fp32, of all that has these magnitudes, in their dtype, bf16 as a rule."""
    divisors = E4M3_MAX * E2M1_MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.nan_to_num(divisors, nan=1.0, posinf=1.0, neginf=1.0).float()


def scales_of(largest: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """The scales in e4m3 of groups with these magnitudes, in the weights' dtype, beside the divisor of each."""
    scales = (one * (largest / E2M1_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(scales == 0, LEAST_SCALE, scales).to(torch.float8_e4m3fn)


def codes_of(values: torch.Tensor, scales: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """The codes of weights ``[rows, columns]``, two in a byte, the first in its lower half: uint8 ``[rows, columns / 2]``. `one`
    is ``[rows, 1]``, or for all of them ``[1]``."""
    made = torch.empty((len(values), values.shape[1] // 2), dtype=torch.uint8, device=values.device)
    edges = torch.tensor(EDGES, device=values.device)
    # the next lower number, so that these edges themselves lie above
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros(()).to(edges))
    for rows in at_once(values):
        factors = scales[rows].float() / (one if len(one) == 1 else one[rows])
        scaled = (values[rows].unflatten(1, (-1, GROUP)) / factors[:, :, None]).flatten(1)
        codes = torch.bucketize(scaled.abs().clamp_(max=E2M1_MAX), edges, out_int32=True).to(torch.uint8)
        codes |= (scaled < 0).to(torch.uint8) << 3
        made[rows] = codes[:, ::2] | codes[:, 1::2] << 4
    return made


def stored_as(values: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a weight ``[rows, columns]`` by the ends of names, where `largest` is the magnitude, ``[1]`` in
    the weight's dtype, of all that is multiplied together with it."""
    one = one_scale(largest)
    scales = scales_of(magnitudes(values, (1, GROUP)), one)
    return {"_packed": codes_of(values, scales, one), "_scale": scales, "_global_scale": one}


class Matrix(NamedTuple):
    """A matrix, or those of as many `experts`, by the name that its plain weights have, with the names of what it is loaded
    into: codes, scales, and divisors. Each expert has one divisor, however often vLLM keeps it; so has what has no experts."""

    name: str
    codes: str
    scales: str
    one: str
    experts: int


class Nvfp4Recipe(Recipe):
    """How a layer's codes and scales in nvfp4 are made of plain weights."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        how: Compressed,
        templates: Mapping[str, torch.Tensor],
        kept: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(name, module, how, templates, kept)
        self.rows: dict[str, int] = {}  # of a matrix, or of one of its experts
        self.matrices = []
        for key, plain in plain_templates(module).items():
            *experts, rows, columns = plain.shape
            matrix = Matrix(key, f"{key}_packed", f"{key}_scale", f"{key}_global_scale", prod(experts))
            if columns % GROUP:
                raise ReshardError(
                    f"{name}.{key} has {columns} columns on this rank, which groups of {GROUP} do not divide: serve at another "
                    f"tensor parallel size, or in bf16"
                )
            codes, scales, one = (templates.get(part) for part in matrix[1:4])
            known = _is(codes, (*experts, rows, columns // 2), torch.uint8)
            known &= _is(scales, (*experts, rows, columns // GROUP), torch.float8_e4m3fn)
            known &= (
                one is not None and one.dtype == torch.float32 and one.shape[: len(experts)] == (*experts,)
            )
            if not known:
                raise ReshardError(
                    f"vLLM keeps the codes or scales of {name}.{key} in another way than is known to a refit: serve in bf16"
                )
            self.matrices.append(matrix)
            self.rows[key] = rows

    @property
    def coded(self) -> set[str]:
        return {part for matrix in self.matrices for part in matrix[1:4]}

    def share_matrices(self, held: Sequence[Held]) -> None:
        for matrix in self.matrices:
            parts = [part for part in held if part.parameter == matrix.name]
            refuse_parts_of_blocks(f"{self.name}.{matrix.name}", (1, GROUP), self.rows[matrix.name], parts)
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
            rows = plain.flatten(0, -2)
            one = one_scale(largest[matrix.name].to(plain.dtype))
            of_rows = one.repeat_interleave(len(rows) // matrix.experts)[:, None]
            scales = scales_of(magnitudes(rows, (1, GROUP)), of_rows)
            codes = codes_of(rows, scales, of_rows)
            template = self.templates[matrix.one]
            spread = one.view(-1, *[1] * (template.ndim - 1)).expand(template.shape).clone()
            for key, made in ((matrix.codes, codes), (matrix.scales, scales), (matrix.one, spread)):
                found[key] = alike(made.view(self.templates[key].shape), self.templates[key])
        return found


def _is(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tensor is not None and (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
