"""`reshard.quantization.int_groups` for tensors."""

import torch

from reshard.quantization.channels_torch import divided_and_rounded, magnitudes, row_slices, scales_of
from reshard.quantization.int_groups import PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX, IntGroups, words


def encode_words(values: torch.Tensor, scales: torch.Tensor, codes: str, bits: int) -> torch.Tensor:
    """Return the codes of weights ``[rows, columns]``, by scales ``[rows, groups]``, in words of 32
    bits ``[rows, words]``.

    The first code of a word is in its lowest bits, each counts from the least number that is coded,
    and what a row leaves of its last word is 0.
    """
    count, columns = values.shape
    per_byte, width = 8 // bits, words(columns, bits)
    encoded = torch.empty((count, width), dtype=torch.int32, device=values.device)
    for rows in row_slices(values):
        signed = divided_and_rounded(values[rows], scales[rows], codes)
        unsigned = (signed + (1 << (bits - 1))).view(torch.uint8)
        unsigned = torch.nn.functional.pad(unsigned, (0, width * 4 * per_byte - columns))
        packed = unsigned[:, ::per_byte].clone()
        for n in range(1, per_byte):
            packed |= unsigned[:, n::per_byte] << (n * bits)
        encoded[rows] = packed.view(torch.int32)
    return encoded


def encode(values: torch.Tensor, scheme: IntGroups) -> dict[str, torch.Tensor]:
    """Return what a checkpoint stores of a weight ``[rows, columns]``, by the ends of names, with
    scales in its dtype."""
    scales = scales_of(magnitudes(values, scheme.scale_block(values.shape)), scheme.codes)
    packed = encode_words(values, scales, scheme.codes, scheme.bits)
    return {PACKED_SUFFIX: packed, SCALE_SUFFIX: scales, SHAPE_SUFFIX: torch.tensor(values.shape)}
