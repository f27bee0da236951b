"""Scales of weights that an engine serves in fp8 blocks, as parts of tensors of their own: for digests."""

from reshard.core.boxes import Box
from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.core.placement import Part
from reshard.device.memory import Region
from reshard.quantization.fp8_blocks import BLOCK
from reshard.storage.io.boxes import Rows

SCALES = "_scale_inv"  # after the name of a weight whose codes have scales by blocks, as files have them


def not_in(target: Dtype, name: str, engine: str) -> str:
    """Return the sentence with which the digest of a weight in blocks is refused in a dtype."""
    return (
        f"this {engine} serves {name} in fp8 blocks, which are no numbers of {target.name}: leave out the dtype, and "
        "compare with reshard digest --stored of a checkpoint in fp8 blocks"
    )


def scales_of(
    name: str, shape: tuple[int, ...], part: Part, region: Region
) -> tuple[str, tuple[int, ...], Box, Region, Rows, Dtype]:
    """Return the scales of a part of a weight: the name and shape of their tensor, their box of it, their region and
    where they lie there, and their dtype. Raises ReshardError if the part begins or ends within a block."""
    blocks = tuple(-(-length // BLOCK) for length in shape)
    box, local = _in_blocks(name, shape, part.box), _rows_in_blocks(name, part.local_box)
    return f"{name}{SCALES}", blocks, box, region, local, DTYPES["float32"]


def _in_blocks(name: str, shape: tuple[int, ...], box: Box) -> Box:
    """Return the box of the scales of a box of codes. Raises ReshardError if it begins or ends within a block."""
    whole = all(
        offset % BLOCK == 0 and (end % BLOCK == 0 or end == length)
        for offset, end, length in zip(box.offsets, box.ends, shape, strict=True)
    )
    if not whole:
        raise ReshardError(
            f"a rank serves a part of {name} that ends within a block of its scales: it has no digest"
        )
    return Box(
        tuple(offset // BLOCK for offset in box.offsets), tuple(-(-length // BLOCK) for length in box.lengths)
    )


def _rows_in_blocks(name: str, local: Box) -> Rows:
    if any(offset % BLOCK for offset in local.offsets):
        raise ReshardError(f"a rank serves {name} from within a block of its scales: it has no digest")
    return Rows.of(
        Box(
            tuple(offset // BLOCK for offset in local.offsets),
            tuple(-(-length // BLOCK) for length in local.lengths),
        )
    )
