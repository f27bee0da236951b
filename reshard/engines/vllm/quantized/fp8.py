"""A check at connect that a refit makes fp8 blocks as this vLLM makes them, bit for bit."""

from functools import cache

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.quantized.layers import own_blocks
from reshard.quantization.fp8_blocks import BLOCK, ROUNDINGS
from reshard.refit.codecs import block_codec
from reshard.refit.fp8_blocks.items import PLACES, BlockTable, items_of
from reshard.refit.tables import CODEC, ROWS, SRC, SRC_PITCH, WIDTH, empty_table


def hard_blocks(device: torch.device) -> torch.Tensor:
    """Return a bf16 matrix ``[600, 840]`` with blocks that are zero, below the smallest scale, at
    the edges of powers of two, of ordinary weights, and cut off."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(600, 840, generator=random) * 0.02
    values[:BLOCK, :BLOCK] = 0
    values[:BLOCK, BLOCK : 2 * BLOCK] *= 1e-4
    for number in range(4):
        values[BLOCK, number * BLOCK] = 1.75 * 2.0**number
        values[2 * BLOCK, number * BLOCK] = (
            torch.nextafter(torch.tensor(1.75), torch.tensor(2.0)) * 2.0**number
        )
    values[3 * BLOCK : 4 * BLOCK] *= torch.exp2(
        torch.randint(-20, 20, (BLOCK, 840), generator=random).float()
    )
    return values.to(torch.bfloat16).to(device)


def our_blocks(values: torch.Tensor, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes, and the scales, that a refit makes of a bf16 matrix which comes in
    four fragments."""
    rows, columns = values.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    codes = torch.zeros((rows, columns), dtype=torch.uint8, device=values.device)
    scales = torch.zeros((down, across), dtype=torch.float32, device=values.device)
    codec = block_codec(rounding)
    at = [(row, column) for row in (0, rows // 2 + 3) for column in (0, columns // 2 + 4)]
    table, into = empty_table(4), np.array([(0, *place) for place in at])
    for number, (row, column) in enumerate(at):
        table[number, SRC] = values.data_ptr() + (row * columns + column) * 2
        table[number, ROWS] = rows - row if row else rows // 2 + 3
        table[number, WIDTH] = columns - column if column else columns // 2 + 4
    table[:, SRC_PITCH], table[:, CODEC] = columns * 2, codec
    places = np.zeros((1, PLACES), np.int64)
    places[0] = codes.data_ptr(), scales.data_ptr(), columns, across, rows, columns, codec
    strips = items_of(table, into, np.zeros(4, np.int64), places)
    BlockTable(strips, rounding, values.device, np.arange(len(strips.items))).run()
    return codes.view(torch.float8_e4m3fn), scales


@cache
def check_blocks(rounding: str, device: torch.device) -> None:
    """Raise ReshardError where a refit and vLLM make different bits of `hard_blocks`."""
    values = hard_blocks(device)
    ours, theirs = our_blocks(values, rounding), own_blocks(values, rounding)
    wrong = [
        int((a.view(kind) != b.view(kind)).sum())
        for a, b, kind in zip(ours, theirs, (torch.uint8, torch.int32), strict=True)
    ]
    if any(wrong):
        raise ReshardError(
            f"this vLLM quantizes blocks with {ROUNDINGS[rounding]} in another way than reshard ({wrong[0]} "
            f"of {values.numel()} codes differ, {wrong[1]} scales): serve in bf16"
        )
