"""`reshard.quantization.channels` for tensors: the same arithmetic, with scales in the weights'
dtype, bf16 as a rule.

Scales and codes are made apart, so that ranks that hold parts of what has one scale can first find
the largest magnitude of all.
"""

import torch

from reshard.quantization.channels import RANGES, SCALE_SUFFIX, Channels

DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.int8,  # before they are packed
}
ELEMENTS_AT_ONCE = 16 << 20  # that are divided at a time


def magnitudes(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest magnitude of each block of matrices ``[..., rows, columns]``, where the
    last ones may be smaller: ``[..., blocks, blocks]``."""
    (rows, columns), (height, width) = values.shape[-2:], block
    if rows % height or columns % width:
        values = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    blocks = values.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    return torch.maximum(blocks.amax((-3, -1)), -blocks.amin((-3, -1)))


def scales_of(largest: torch.Tensor, codes: str) -> torch.Tensor:
    """Return the scales of magnitudes, in their dtype."""
    scales = largest / RANGES[codes][2]
    return torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)


def encode_rows(values: torch.Tensor, scales: torch.Tensor, codes: str) -> torch.Tensor:
    """Return the codes of weights ``[rows, columns]`` by scales ``[rows, groups]`` of the same
    dtype, each for as many columns."""
    encoded = torch.empty(values.shape, dtype=DTYPES[codes], device=values.device)
    for rows in row_slices(values):
        encoded[rows] = divided_and_rounded(values[rows], scales[rows], codes)
    return encoded


def encode_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], codes: str
) -> torch.Tensor:
    """Return the codes of matrices ``[..., rows, columns]`` by scales ``[..., blocks, blocks]``."""
    rows, columns = values.shape[-2:]
    if columns % block[1]:
        values = torch.nn.functional.pad(values, (0, -columns % block[1]))
    row_scales = scales.repeat_interleave(block[0], -2)[..., :rows, :]
    encoded = encode_rows(values.flatten(0, -2), row_scales.flatten(0, -2), codes).view(values.shape)
    return encoded[..., :columns].contiguous()


def encode(values: torch.Tensor, scheme: Channels) -> dict[str, torch.Tensor]:
    """Return what a checkpoint stores of a weight ``[rows, columns]``, by the ends of names, with
    scales in its dtype."""
    block = scheme.scale_block(values.shape)
    scales = scales_of(magnitudes(values, block), scheme.codes)
    codes = encode_blocks(values, scales, block, scheme.codes)
    return {"": codes, SCALE_SUFFIX: scales.flatten() if scheme.strategy == "tensor" else scales}


def row_slices(values: torch.Tensor) -> list[slice]:
    """Return runs of the rows of a matrix that are divided at a time."""
    step = max(1, ELEMENTS_AT_ONCE // max(1, values.shape[1]))
    return [slice(start, start + step) for start in range(0, len(values), step)]


def divided_and_rounded(values: torch.Tensor, scales: torch.Tensor, codes: str) -> torch.Tensor:
    """Return the codes of a few rows; those of 4 bits in a byte each."""
    least, most, _ = RANGES[codes]
    scaled = values.unflatten(1, (scales.shape[1], -1)) / scales[:, :, None]
    scaled += 0  # the zero point, which makes 0 of -0
    scaled.clamp_(least, most)
    rounded = scaled.round_() if DTYPES[codes] == torch.int8 else scaled
    return rounded.to(DTYPES[codes]).view(values.shape)
