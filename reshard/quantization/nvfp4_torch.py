"""nvfp4 for tensors, as the two packages make it that write such checkpoints.

A code is a weight divided in fp32 by what its scales make together, clamped to 6 and rounded to the
nearest, ties to even codes, where negative numbers keep their sign. The packages differ in how they
make scales:

- compressed-tensors 0.17 (``generate_gparam``, ``calculate_qparams``, ``NVFP4PackedCompressor``)
  divides in the weights' dtype: the global scale is a divisor, ``2688 / largest`` of all; that of
  16 columns is ``global * (their largest / 6)``, rounded to e4m3, where 0 becomes 1/8; together
  ``scale / global``.
- ModelOpt 0.47 (``NVFP4QTensor``) divides in fp32: the global scale is a factor, ``largest /
  2688``; that of 16 columns is ``their largest / (6 * global)``, where 0 becomes 1, of at least
  2**-9; together ``scale * global``. Where all weights are 0 it makes NaN of scales, and here the
  global scale is 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from reshard.core.errors import ReshardError
from reshard.quantization import modelopt
from reshard.quantization.channels import SCALE_SUFFIX
from reshard.quantization.channels_torch import magnitudes, row_slices
from reshard.quantization.fp8_blocks import E4M3_MAX
from reshard.quantization.int_groups import PACKED_SUFFIX
from reshard.quantization.nvfp4 import E2M1_MAX, EDGES, GLOBAL_SCALE_SUFFIX, GROUP, NO_SCALE, Nvfp4


class Scaling(ABC):
    """The way a package makes scales of magnitudes that are in the weights' dtype, bf16 as a rule; and
    the ends of the names of codes, scales, and the global scale."""

    suffixes: tuple[str, str, str]

    @abstractmethod
    def global_scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the global scales, in fp32, of weights with these magnitudes. Raises ReshardError
        if their dtype holds none."""

    @abstractmethod
    def scales(self, largest: torch.Tensor, global_scales: torch.Tensor) -> torch.Tensor:
        """Return the scales in e4m3 of groups with these magnitudes, each with its global scale."""

    @abstractmethod
    def combined(self, scales: torch.Tensor, global_scales: torch.Tensor) -> torch.Tensor:
        """Return what weights are divided by, in fp32."""


class CompressedTensors(Scaling):
    """Scales as compressed-tensors makes them."""

    suffixes = (PACKED_SUFFIX, SCALE_SUFFIX, GLOBAL_SCALE_SUFFIX)

    def global_scales(self, largest: torch.Tensor) -> torch.Tensor:
        divisors = E4M3_MAX * E2M1_MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)
        divisors = torch.nan_to_num(divisors, nan=1.0, posinf=1.0, neginf=1.0).float()
        if largest.dtype == torch.float16:
            lost = (largest > 0) & (largest.float() * divisors < 1)
            if bool(lost.any()):
                raise ReshardError(
                    f"weights are {float(largest[lost][0]):.3g} at most, for which float16 holds no scale of "
                    "nvfp4: serve in bf16"
                )
        return divisors

    def scales(self, largest: torch.Tensor, global_scales: torch.Tensor) -> torch.Tensor:
        exact = (global_scales * (largest / E2M1_MAX)).clamp(-E4M3_MAX, E4M3_MAX)
        scales = exact.to(torch.float8_e4m3fn).float()
        return torch.where(scales == 0, NO_SCALE, scales).to(torch.float8_e4m3fn)

    def combined(self, scales: torch.Tensor, global_scales: torch.Tensor) -> torch.Tensor:
        return scales.float() / global_scales


class ModelOpt(Scaling):
    """Scales as ModelOpt makes them."""

    suffixes = ("", SCALE_SUFFIX, modelopt.GLOBAL_SCALE_SUFFIX)

    def global_scales(self, largest: torch.Tensor) -> torch.Tensor:
        factors = largest.float() / (E2M1_MAX * E4M3_MAX)
        return torch.where(factors == 0, 1.0, factors)

    def scales(self, largest: torch.Tensor, global_scales: torch.Tensor) -> torch.Tensor:
        scales = largest.float() / (E2M1_MAX * global_scales)
        return torch.where(scales == 0, 1.0, scales).clamp(2**-9, E4M3_MAX).to(torch.float8_e4m3fn)

    def combined(self, scales: torch.Tensor, global_scales: torch.Tensor) -> torch.Tensor:
        return scales.float() * global_scales


def scaling_of(scheme: Nvfp4) -> Scaling:
    """Return the scaling of the package that stores a scheme."""
    return CompressedTensors() if scheme.divides else ModelOpt()


def encode_codes(values: torch.Tensor, combined: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return the codes of weights ``[rows, columns]``, two in a byte, the first in its lower half:
    uint8 ``[rows, columns / 2]``.

    `combined` gives what some of the rows are divided by: ``[rows, groups]`` in fp32.
    """
    encoded = torch.empty((len(values), values.shape[1] // 2), dtype=torch.uint8, device=values.device)
    edges = torch.tensor(EDGES, dtype=torch.float32, device=values.device)
    # the next lower number, so that these edges themselves lie above
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros_like(edges[1::2]))
    for rows in row_slices(values):
        scaled = (values[rows].unflatten(1, (-1, GROUP)) / combined(rows)[:, :, None]).flatten(1)
        codes = torch.bucketize(scaled.abs(), edges, out_int32=True).to(torch.uint8)
        codes |= (scaled < 0).to(torch.uint8) << 3
        encoded[rows] = codes[:, ::2] | codes[:, 1::2] << 4
    return encoded


def encode(values: torch.Tensor, largest: torch.Tensor, scaling: Scaling) -> dict[str, torch.Tensor]:
    """Return what a checkpoint stores of weights ``[rows, columns]`` by the ends of names.

    `largest` ``[n]``, in the weights' dtype, are the magnitudes of all that shares a global scale,
    for as many equal parts of the rows.
    """
    global_scales = scaling.global_scales(largest)
    row_scales = global_scales.repeat_interleave(len(values) // len(global_scales))[:, None]
    scales = scaling.scales(magnitudes(values, (1, GROUP)), row_scales)
    codes = encode_codes(values, lambda rows: scaling.combined(scales[rows], row_scales[rows]))
    return dict(zip(scaling.suffixes, (codes, scales, global_scales), strict=True))
