"""The seam of codecs that encode blocks.

A codec of elements is a cast, which a table of copies carries out. The elements of a block become something together,
such as codes with a scale, and they may come in pieces from several of the trainer's ranks. So such a codec has a
`BlockMaker`, which makes its own work of pieces: packed on their way (`pack`), pulled from where they lie (`pull`), or
put together of parts that several ranks send (`split`, `slab`). What it returns runs beside tables of copies.
`reshard.refit.codecs.makers` says which maker a codec has; nobody else names one.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from reshard.refit.copying.addresses import Pieces
from reshard.refit.copying.flows import OwnedCopies, Placed
from reshard.refit.engine import Engine


class BlocksToMake(Protocol):
    """Blocks that `run` makes, which follow memory that moves."""

    def run(self, tiles: torch.Tensor | None = None) -> None:
        """Make them; on a GPU, enqueue it on the current stream, with `tiles` of plain copies in the same launch
        (`CopyTable.of_widest_words`)."""

    def shift(self, shifts: np.ndarray) -> None:
        """Add `shifts` bytes, multiples of 16, by owner, to the addresses of the sources."""

    def move(self, distance: int) -> None:
        """Add `distance` bytes, a multiple of 16, to the addresses of what is made."""


class PackedBlocks(Protocol):
    """The blocks that the pieces of a pair make up, numbered from 0 alike at both ends, with the bytes that each
    takes in `sizes`."""

    sizes: np.ndarray

    @property
    def facts(self) -> Sequence[np.ndarray]:
        """Arrays that are the same of packed blocks that hold the same bytes, for who compares pairs."""

    def making(self, first: int, last: int, begins: np.ndarray, device: torch.device) -> BlocksToMake:
        """Return what makes the blocks from number `first` up to `last`, each from its address in `begins` on."""

    def copies(self, first: int, last: int, begins: np.ndarray) -> np.ndarray:
        """Return the plain copies of these blocks, made from `begins` on, to where they are served from."""


class PartsSlab(Protocol):
    """An inference rank's memory in which the parts of blocks meet that several of the trainer's ranks send, in
    rounds. `through` masks the pieces that come through it, by trainer's rank; `numbers` are its rounds."""

    through: dict[int, np.ndarray]
    numbers: set[int]

    @property
    def launches(self) -> int:
        """Kernels that make the blocks of all rounds."""

    def arrange(self, pieces: Mapping[int, Pieces], sent: Collection[int]) -> None:
        """Make ready for these pieces, of which the trainer's ranks in `sent` send theirs."""

    def described(self) -> dict[str, int]:
        """Return, for logs, the bytes that come through it, in how many rounds, and its own bytes."""

    def placed(self, rank: int, table: np.ndarray, pieces: Pieces) -> np.ndarray:
        """Return the table of a rank's pieces, with those that come through the slab going there."""

    def make(self, number: int) -> None:
        """Make the blocks of a round; on a GPU, enqueue it on the current stream."""

    def mismatches(self, number: int) -> list[int]:
        """Return the indices of the local tensors whose blocks are not what the parts in the slab make."""


class BlockDigests(Protocol):
    """Digests of blocks at one end of a pair, in the same order at both; `tensors` are the indices of their local
    tensors."""

    tensors: np.ndarray

    def begin(self) -> None:
        """Take the digests; on a GPU, enqueue it on the current stream."""

    def result(self) -> np.ndarray:
        """Return the digests that were begun, as int64."""


class BlockCheck(Protocol):
    """The check of blocks that an inference rank made itself of memory that is mapped here."""

    def begin(self) -> None:
        """Begin the check; on a GPU, enqueue it on the current stream."""

    def result(self) -> tuple[list[int], dict[int, np.ndarray]]:
        """Return the indices of the local tensors that differ, and the digests of the pieces by trainer's rank."""


class BlockMaker(ABC):
    """Makes the blocks of a kind of codecs. `places` say where the blocks of local tensors lie
    (`reshard.refit.codecs.places`), by their index in `destinations`."""

    @abstractmethod
    def compile(self, codecs: np.ndarray, makes: bool, device: torch.device) -> None:
        """Compile now the kernels that the first refit would wait for where blocks of these codecs, among others,
        are made by this rank to be sent, or arrive here. Raises ReshardError where this GPU cannot make them."""

    @abstractmethod
    def compile_pull(self, itemsize: int, device: torch.device) -> None:
        """Compile what nearly every pull of elements of `itemsize` bytes launches."""

    @abstractmethod
    def split(self, pieces: Mapping[int, Pieces], places: np.ndarray, first_round: int) -> dict[int, Pieces]:
        """Cut pieces, by trainer's rank, so that each block belongs to one rank, or to pieces with one place in the
        slab, from round `first_round` on."""

    @abstractmethod
    def slab(self, engine: Engine, device: torch.device) -> PartsSlab:
        """Return the slab of an engine's rank, which has no memory where no parts are sent."""

    @abstractmethod
    def pack(self, pieces: Placed, places: np.ndarray) -> PackedBlocks:
        """Return the blocks that pieces make up, for the end, source or destination, that they have filled in."""

    @abstractmethod
    def pull(self, copies: OwnedCopies, places: np.ndarray, device: torch.device) -> BlocksToMake:
        """Return what makes blocks of pieces where these lie, in an order in which the links to all peers are busy at
        once."""

    @abstractmethod
    def padding_outside(self, padding: Placed, sent: Sequence[Placed], places: np.ndarray) -> Placed:
        """Return the rows of padding that lie in no block of the pieces that are `sent`: those bring their own."""

    @abstractmethod
    def digests(self, pieces: Placed, places: np.ndarray, served: bool, device: torch.device) -> BlockDigests:
        """Return the digests of the blocks that pieces make up: as they are made anew, or as they are `served`."""

    @abstractmethod
    def check(
        self,
        engine: Engine,
        pieces: Mapping[int, Pieces],
        shards: Mapping[int, np.ndarray],
        sent: np.ndarray,
        device: torch.device,
    ) -> BlockCheck:
        """Return the check of an engine's blocks that are made of `pieces`, by trainer's rank, whose `shards` are
        mapped here: (address, pitch in bytes). Of the local tensors in `sent` some blocks come another way."""
