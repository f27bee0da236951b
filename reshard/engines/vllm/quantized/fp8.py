"""A check at connect that a refit makes fp8 blocks as this vLLM makes them."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch.compiler import set_stance

from reshard.core.errors import ReshardError
from reshard.engines.vllm.quantized.layers import own_blocks
from reshard.quantization.fp8_blocks import BLOCK, ROUNDINGS, encode
from reshard.refit.codecs import block_codec
from reshard.refit.codecs.places import PLACES
from reshard.refit.copying.tables import ALIGNMENT, CODEC, ROWS, SRC, SRC_PITCH, WIDTH, empty_table
from reshard.refit.fp8_blocks.items import BlockTable, items_of


def hard_blocks(device: torch.device) -> torch.Tensor:
    """Return a bf16 matrix ``[600, 848]`` with blocks that are zero, below the smallest scale, at
    the edges of powers of two, of ordinary weights, and cut off."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(600, 848, generator=random) * 0.02
    values[:BLOCK, :BLOCK] = 0
    values[:BLOCK, BLOCK : 2 * BLOCK] *= 1e-4
    for number in range(4):
        values[BLOCK, number * BLOCK] = 1.75 * 2.0**number
        values[2 * BLOCK, number * BLOCK] = (
            torch.nextafter(torch.tensor(1.75), torch.tensor(2.0)) * 2.0**number
        )
    values[3 * BLOCK : 4 * BLOCK] *= torch.exp2(
        torch.randint(-20, 20, (BLOCK, 848), generator=random).float()
    )
    return values.to(torch.bfloat16).to(device)


def our_blocks(values: torch.Tensor, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes, and the scales, that a refit makes of a bf16 matrix which comes in
    four fragments. Of `hard_blocks` all are aligned, as most weights are, so that refits run the same
    kernel."""
    rows, columns = values.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    codes = torch.zeros((rows, columns), dtype=torch.uint8, device=values.device)
    scales = torch.zeros((down, across), dtype=torch.float32, device=values.device)
    codec = block_codec(rounding)
    right = columns // 2 // ALIGNMENT * ALIGNMENT  # the column at which fragments end
    at = [(row, column) for row in (0, rows // 2 + 3) for column in (0, right)]
    table, into = empty_table(4), np.array([(0, *place) for place in at])
    for number, (row, column) in enumerate(at):
        table[number, SRC] = values.data_ptr() + (row * columns + column) * 2
        table[number, ROWS] = rows - row if row else rows // 2 + 3
        table[number, WIDTH] = columns - column if column else right
    table[:, SRC_PITCH], table[:, CODEC] = columns * 2, codec
    places = np.zeros((1, PLACES), np.int64)
    places[0] = codes.data_ptr(), scales.data_ptr(), columns, across, rows, columns, codec
    strips = items_of(table, into, np.zeros(4, np.int64), places)
    BlockTable(strips, values.device, np.arange(len(strips.items))).run()
    return codes.view(torch.float8_e4m3fn), scales


@cache
def check_blocks(rounding: str, device: torch.device, bit_for_bit: bool) -> None:
    """Raise ReshardError if a refit and vLLM make different blocks of `hard_blocks`.

    With `bit_for_bit` vLLM's function is compared as vLLM runs it, which may take torch some
    ten seconds to compile. Otherwise its arithmetic is: uncompiled, on the CPU, with our account of it; and
    our kernel with the same account, in which a compiled function divides by 448 as by a product.
    """
    values = hard_blocks(device)
    if bit_for_bit:
        wrong = _unlike(our_blocks(values, rounding), own_blocks(values, rounding))
    else:
        ours, on_host = our_blocks(values, rounding), values.cpu()
        with set_stance("force_eager"):
            theirs = own_blocks(on_host, rounding)
        wrong = _unlike(theirs, _account(on_host, rounding, divide=True))
        if not any(wrong):
            wrong = _far_from(ours, _account(on_host, rounding, divide=False))
    if any(wrong):
        raise ReshardError(
            f"this vLLM quantizes blocks with {ROUNDINGS[rounding]} in another way than reshard ({wrong[0]} "
            f"of {values.numel()} codes differ, {wrong[1]} scales): serve in bf16"
        )


def _account(values: torch.Tensor, rounding: str, divide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of `encode`."""
    codes, scales = encode(values.float().numpy(), rounding, divide)
    return torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn), torch.from_numpy(scales)


def _unlike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[int]:
    """Return how many codes, and how many scales, have different bits."""
    kinds = torch.uint8, torch.int32
    return [int((a.view(k) != b.view(k)).sum()) for a, b, k in zip(one, other, kinds, strict=True)]


def _far_from(ours: Sequence[torch.Tensor], account: Sequence[torch.Tensor]) -> list[int]:
    """Return how many codes are further than one from those of an account, and how many scales by more than
    their last bits: a GPU divides in its own way."""
    (codes, scales), (wanted, wanted_scales) = (tensor.cpu() for tensor in ours), account
    apart = (codes.view(torch.int8).int() - wanted.view(torch.int8).int()).abs()
    return [
        int((apart > 1).sum()),
        int((~torch.isclose(scales, wanted_scales, rtol=1e-6, atol=0)).sum()),
    ]
