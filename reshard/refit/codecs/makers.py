"""The makers of blocks, by the kind of their codecs."""

from collections.abc import Iterable, Mapping

import numpy as np

from reshard.core.errors import ReshardError
from reshard.refit.codecs import CODECS, IN_BLOCKS, Codec, Fp8BlockCodec, block_codec
from reshard.refit.codecs.blocks import BlockMaker
from reshard.refit.engine import Engine
from reshard.refit.fp8_blocks.maker import Fp8BlockMaker

FP8_BLOCKS = Fp8BlockMaker()
MAKERS: Mapping[type[Codec], BlockMaker] = {Fp8BlockCodec: FP8_BLOCKS}


def maker_of(codecs: np.ndarray) -> BlockMaker:
    """Return what makes the blocks among what has these codecs, all of one kind. Where none is of blocks, that is any
    maker, which has nothing to make then."""
    return _maker(np.unique(codecs[IN_BLOCKS[codecs]]).tolist())


def maker_for(engine: Engine) -> BlockMaker:
    """Return what makes the blocks that an engine serves, as `maker_of`."""
    return _maker(block_codec(rounding) for rounding in {one.rounding for one in engine.scales.values()})


def _maker(numbers: Iterable[int]) -> BlockMaker:
    makers = {MAKERS[type(CODECS[number])] for number in numbers}
    if len(makers) > 1:
        raise ReshardError(
            "an engine serves blocks of two kinds, which no refit makes at once: serve one kind"
        )
    return makers.pop() if makers else FP8_BLOCKS
