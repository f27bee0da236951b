"""The Triton kernel that writes and compares transposes (`reshard.refit.copying.transposes`)."""

from functools import cache

import torch
import triton
import triton.language as tl

from reshard.refit.copying.kernels import WORDS, columns, expected_compilation
from reshard.refit.copying.tables import ALIGNMENT

WIDE, FROM, INTO, ROWS, WIDTH, FROM_PITCH, INTO_PITCH = columns(
    "TRANSPOSE TRANSPOSE_FROM TRANSPOSE_INTO TRANSPOSE_ROWS TRANSPOSE_COLUMNS FROM_PITCH INTO_PITCH"
)
# Elements along both sides of a tile, of which a row is a line of 128 bytes in bf16.
SIDE = 64


def tiles_of_matrix(rows: int, columns: int) -> int:
    """Return of how many tiles a matrix is."""
    return triton.cdiv(rows, SIDE) * triton.cdiv(columns, SIDE)


@triton.jit
def _transpose(
    table,
    differing,
    WORD: tl.constexpr,
    STEP: tl.constexpr,
    COMPARE: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Carry out a tile of a matrix. `STEP` is the number of elements of which all starts and lengths are multiples."""
    matrix = tl.program_id(1).to(tl.int64)
    row = table + matrix * WIDE
    rows, width = tl.load(row + ROWS).to(tl.int32), tl.load(row + WIDTH).to(tl.int32)
    across = tl.cdiv(width, SIDE)
    tile = tl.program_id(0)
    if tile < across * tl.cdiv(rows, SIDE):
        rows, width = tl.multiple_of(rows, STEP), tl.multiple_of(width, STEP)
        from_pitch = tl.multiple_of(tl.load(row + FROM_PITCH), STEP)
        into_pitch = tl.multiple_of(tl.load(row + INTO_PITCH), STEP)
        unit: tl.constexpr = WORD.primitive_bitwidth // 8
        src = tl.multiple_of(tl.load(row + FROM), STEP * unit).to(tl.pointer_type(WORD))
        dst = tl.multiple_of(tl.load(row + INTO), STEP * unit).to(tl.pointer_type(WORD))
        r = (tile // across) * SIDE + tl.arange(0, SIDE)
        c = (tile % across) * SIDE + tl.arange(0, SIDE)
        value = tl.load(
            src + r[:, None].to(tl.int64) * from_pitch + c[None, :],
            mask=(r < rows)[:, None] & (c < width)[None, :],
            other=0,
        )
        turned = tl.trans(value)
        where = dst + c[:, None].to(tl.int64) * into_pitch + r[None, :]
        inside = (c < width)[:, None] & (r < rows)[None, :]
        if COMPARE:
            held = tl.load(where, mask=inside, other=0)
            tl.atomic_or(differing + matrix, tl.max((held != turned).to(tl.int32)))
        else:
            tl.store(where, turned, mask=inside)


def transpose(
    table: torch.Tensor, size: int, aligned: bool, tiles: int, differing: torch.Tensor | None
) -> None:
    """Write the transposes of a table, of elements of `size` bytes, none of more `tiles`; or set a bit of `differing`
    for each that is not what is at its place."""
    step = ALIGNMENT // size if aligned else 1
    out = table if differing is None else differing
    _transpose[(tiles, len(table))](table, out, WORDS[size], step, differing is not None, SIDE, num_warps=4)


@cache
def compile_transposes(size: int, device: torch.device) -> None:
    """Compile the kernels for elements of this size now, by transposing nothing, so that the first refit does not wait
    for that."""
    with torch.cuda.device(device), expected_compilation():
        nothing = torch.zeros((1, WIDE.value), dtype=torch.int64, device=device)
        differing = torch.zeros(1, dtype=torch.int32, device=device)
        for aligned in (True, False):
            transpose(nothing, size, aligned, 1, None)
            transpose(nothing, size, aligned, 1, differing)
        torch.cuda.synchronize(device)
