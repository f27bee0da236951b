"""Blocks of fp8, behind the seam of codecs: what makes them in all the ways in which pieces come."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from reshard.refit.codecs import IN_BLOCKS
from reshard.refit.codecs.blocks import BlockMaker
from reshard.refit.codecs.places import SHAPE
from reshard.refit.copying.addresses import Pieces
from reshard.refit.copying.flows import PADDING, OwnedCopies, Placed
from reshard.refit.copying.tables import interleaved
from reshard.refit.engine import Engine
from reshard.refit.fp8_blocks.check import Fp8BlockCheck
from reshard.refit.fp8_blocks.items import BlockTable, items_of, take_kernel_of_pieces
from reshard.refit.fp8_blocks.packed import (
    Fp8BlockDigests,
    Fp8PackedBlocks,
    compile_block_kernels,
    padding_outside,
)
from reshard.refit.fp8_blocks.split import SplitBlocksSlab, split_pieces
from reshard.refit.fp8_blocks.tables import FIRST_FRAGMENT, BlockKernel


class Fp8BlockMaker(BlockMaker):
    """Makes blocks of fp8."""

    def compile(self, codecs: np.ndarray, makes: bool, device: torch.device) -> None:
        compile_block_kernels(codecs[IN_BLOCKS[codecs]], makes, device)

    def compile_pull(self, itemsize: int, device: torch.device) -> None:
        from reshard.refit.fp8_blocks.kernels import compile_quantize

        compile_quantize(BlockKernel(True, size=itemsize), device)

    def split(self, pieces: Mapping[int, Pieces], places: np.ndarray, first_round: int) -> dict[int, Pieces]:
        return split_pieces(pieces, places[:, SHAPE], first_round)

    def slab(self, engine: Engine, device: torch.device) -> SplitBlocksSlab:
        return SplitBlocksSlab(engine, device)

    def pack(self, pieces: Placed, places: np.ndarray) -> Fp8PackedBlocks:
        return Fp8PackedBlocks(pieces, places)

    def pull(self, copies: OwnedCopies, places: np.ndarray, device: torch.device) -> BlockTable:
        table = copies.table.copy()
        take_kernel_of_pieces(table, copies.ranks == PADDING)
        owners = np.stack([copies.owners, copies.ranks], 1)
        strips = items_of(table, copies.destinations, owners, places)
        order = interleaved(strips.owners[strips.items[:, FIRST_FRAGMENT], 1])
        return BlockTable(strips._replace(owners=strips.owners[:, 0]), device, order)

    def padding_outside(self, padding: Placed, sent: Sequence[Placed], places: np.ndarray) -> Placed:
        return padding_outside(padding, sent, places)

    def digests(
        self, pieces: Placed, places: np.ndarray, served: bool, device: torch.device
    ) -> Fp8BlockDigests:
        return Fp8BlockDigests(pieces, places, served, device)

    def check(
        self,
        engine: Engine,
        pieces: Mapping[int, Pieces],
        shards: Mapping[int, np.ndarray],
        sent: np.ndarray,
        device: torch.device,
    ) -> Fp8BlockCheck:
        return Fp8BlockCheck(engine, pieces, shards, sent, device)
