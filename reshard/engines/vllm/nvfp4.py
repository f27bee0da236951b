"""Layers that vLLM loads from checkpoints in nvfp4: numbers of 4 bits (e2m1) with a scale in e4m3 for 16 columns of a row, and
one in fp32 for all that vLLM multiplies at once, such as q, k and v, or gate and up of an expert.

A code is a weight divided in fp32 by what its scales make together, clamped to 6 and rounded to the nearest, ties to even
codes, where negative numbers keep their sign. Two packages write such checkpoints:

- compressed-tensors 0.17 (``generate_gparam``, ``calculate_qparams``, ``NVFP4PackedCompressor``) divides in the weights' dtype:
  the one scale is a divisor, ``2688 / largest`` of all; that of 16 columns is ``one * (their largest / 6)``, rounded to e4m3,
  where 0 becomes 1/8; together ``scale / one``.
- ModelOpt 0.47 (``NVFP4QTensor``) divides in fp32: the one scale is a factor, ``largest / 2688``; that of 16 columns is ``their
  largest / (6 * one)``, where 0 becomes 1, of at least 2**-9; together ``scale * one``. Where all weights are 0 it makes NaN
  of scales, and here the one scale is 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compressed import at_once, magnitudes
from reshard.engines.vllm.layers import Compressed, plain_templates
from reshard.engines.vllm.recipes import Held, Recipe, alike, refuse_parts_of_blocks

GROUP = 16  # columns that share a scale
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# What a magnitude has to be greater than to have the second code, the third and so on; where the lower of two codes is odd,
# what lies between them goes to the higher one.
EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Scaling(ABC):
    """How a package makes the scales of magnitudes that are in the weights' dtype, bf16 as a rule; and the ends of the names
    of codes, scales, and the one scale."""

    ends: tuple[str, str, str]

    @abstractmethod
    def one(self, largest: torch.Tensor) -> torch.Tensor:
        """The one scale, in fp32, of all that has these magnitudes. Raises ReshardError where their dtype holds none."""

    @abstractmethod
    def scales(self, largest: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        """The scales in e4m3 of groups with these magnitudes, beside the one scale of each."""

    @abstractmethod
    def together(self, scales: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        """What weights are divided by, in fp32."""


class CompressedTensors(Scaling):
    """As compressed-tensors does."""

    ends = ("_packed", "_scale", "_global_scale")

    def one(self, largest: torch.Tensor) -> torch.Tensor:
        divisors = E4M3_MAX * E2M1_MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)
        divisors = torch.nan_to_num(divisors, nan=1.0, posinf=1.0, neginf=1.0).float()
        if largest.dtype == torch.float16:
            lost = (largest > 0) & (largest.float() * divisors < 1)
            if bool(lost.any()):
                raise ReshardError(
                    f"weights are {float(largest[lost][0]):.3g} at most, for which float16 holds no scale of nvfp4: serve in bf16"
                )
        return divisors

    def scales(self, largest: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        scales = (one * (largest / E2M1_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        return torch.where(scales == 0, 0.125, scales).to(torch.float8_e4m3fn)

    def together(self, scales: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return scales.float() / one


class ModelOpt(Scaling):
    """As ModelOpt does."""

    ends = ("", "_scale", "_scale_2")

    def one(self, largest: torch.Tensor) -> torch.Tensor:
        factors = largest.float() / (E2M1_MAX * E4M3_MAX)
        return torch.where(factors == 0, 1.0, factors)

    def scales(self, largest: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        scales = largest.float() / (E2M1_MAX * one)
        return torch.where(scales == 0, 1.0, scales).clamp(2**-9, E4M3_MAX).to(torch.float8_e4m3fn)

    def together(self, scales: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return scales.float() * one


def scaling_of(how: Compressed) -> Scaling:
    """That of the package which writes what a layer is loaded from."""
    assert how.packed is not None
    return CompressedTensors() if how.packed.end else ModelOpt()


def codes_of(values: torch.Tensor, factors: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """The codes of weights ``[rows, columns]``, two in a byte, the first in its lower half: uint8 ``[rows, columns / 2]``.
    `factors` gives what some of the rows are divided by: ``[rows, groups]`` in fp32."""
    made = torch.empty((len(values), values.shape[1] // 2), dtype=torch.uint8, device=values.device)
    edges = torch.tensor(EDGES, dtype=torch.float32, device=values.device)
    # the next lower number, so that these edges themselves lie above
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros_like(edges[1::2]))
    for rows in at_once(values):
        scaled = (values[rows].unflatten(1, (-1, GROUP)) / factors(rows)[:, :, None]).flatten(1)
        codes = torch.bucketize(scaled.abs(), edges, out_int32=True).to(torch.uint8)
        codes |= (scaled < 0).to(torch.uint8) << 3
        made[rows] = codes[:, ::2] | codes[:, 1::2] << 4
    return made


def stored_as(values: torch.Tensor, largest: torch.Tensor, scaling: Scaling) -> dict[str, torch.Tensor]:
    """What a checkpoint has of weights ``[rows, columns]`` by the ends of names. `largest`, in the weights' dtype, are the
    magnitudes of all that has one scale, ``[n]``, for as many equal parts of the rows."""
    one = scaling.one(largest)
    of_rows = one.repeat_interleave(len(values) // len(one))[:, None]
    scales = scaling.scales(magnitudes(values, (1, GROUP)), of_rows)
    codes = codes_of(values, lambda rows: scaling.together(scales[rows], of_rows[rows]))
    return dict(zip(scaling.ends, (codes, scales, one), strict=True))


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
        self.scaling = scaling_of(self.how)
        self.matrices = []
        for key, plain in plain_templates(self.module).items():
            *experts, rows, columns = plain.shape
            codes_suffix, scales_end, one_end = self.scaling.ends
            parts = key + codes_suffix, key + scales_end, key + one_end
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
            made = stored_as(plain.flatten(0, -2), largest[matrix.name].to(plain.dtype), self.scaling)
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
