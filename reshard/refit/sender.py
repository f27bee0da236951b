"""A member as a rank of the trainer: what it tells of its memory, what it is asked for, and the copies that follow."""

from weakref import WeakKeyDictionary

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError
from reshard.device.cuda import Allocation, frees_of, generation_of, is_exportable
from reshard.models.model import Model
from reshard.refit.addresses import (
    ASKED,
    ASKED_OF_BLOCKS,
    AT_ONCE,
    ENCODED,
    EXTENT,
    ROUND,
    SHARD,
    WHERE,
    allocations_of,
    as_sent,
    located,
    memory_of,
    source_table,
)
from reshard.refit.agreement import Agreement
from reshard.refit.codecs import BLOCKWISE
from reshard.refit.fp8_blocks.items import PLACES
from reshard.refit.fp8_blocks.packed import compile_block_kernels, places_of_requests
from reshard.refit.protocol.checks import Extents, check_asked
from reshard.refit.protocol.encoding import (
    DIGEST_BYTES,
    digest,
    pack_array,
    pack_digests,
    pack_held,
    pack_json,
    unpack_array,
)
from reshard.refit.routes import CUDA_IPC, SENT
from reshard.refit.transports.base import Outgoing
from reshard.trainers.base import Trainer

# What has been published of a model, for who connects the same trainer again.
_published: WeakKeyDictionary[Trainer, tuple[tuple[Model, list[torch.dtype]], bytes, bytes, Extents]] = (
    WeakKeyDictionary()
)


class Sender:
    """A trainer's rank in a connection: what inference ranks ask it for, and where its memory is."""

    def __init__(self, source: Trainer, members: RefitGroup, agreed: Agreement, device: torch.device) -> None:
        self.source, self.members, self.agreed, self.device = source, members, agreed, device
        self.asked: dict[int, np.ndarray] = {}
        self.extents = Extents.of([], [])
        # What tells what this rank has said that it holds, and last of its memory, from anything else.
        self.held_digest = self.memory_digest = b""
        # Where the parameters were, and the allocations that they are in, when this rank last told the
        # others.
        self.told: tuple[list[int], list[Allocation]] = [], []
        self.frees: int | None = None
        self.exported = False

    def publish(self, model: Model) -> None:
        """Tell what this rank holds of the model."""
        self.source.check_memory(self.device)
        self.source.check_model(model)
        dtypes = [region.tensor.dtype for region in self.source.regions]
        known, header, parts, self.extents = _published.get(self.source, (None, b"", b"", self.extents))
        if known != (model, dtypes):
            names = {dtype: dtype_named(str(dtype)).name for dtype in set(dtypes)}
            held, named = self.source.publish(model), [names[dtype] for dtype in dtypes]
            header, parts = pack_held(held, named)
            self.extents = Extents.of(held, named)
            _published[self.source] = (model, dtypes), header, parts, self.extents
        self.held_digest = digest(header, parts)
        self.members.post("held", header)
        self.members.post("parts", parts)

    def receive_requests(self) -> None:
        """Read which pieces every inference rank asks for, and tell where they are."""
        requests = self.members.read_all(f"pieces/{self.members.rank}", self.agreed.engines)
        asked = {
            rank: self._pieces(rank, request)
            for rank, request in zip(self.agreed.engines, requests, strict=True)
        }
        self.asked = {rank: pieces for rank, pieces in asked.items() if len(pieces)}
        self.told = self._look()
        self._tell()
        answer = pack_digests([self.memory_digest, *map(digest, requests)])
        self.members.post("asked", answer)

    def _pieces(self, rank: int, request: bytes) -> np.ndarray:
        """The pieces that an inference rank asks for. Raises ReshardError where this rank does not have them, or has said something
        else of what it holds than was heard."""
        who = self.members.names[rank]
        if request[:DIGEST_BYTES] != self.held_digest:
            me = self.members.names[self.members.rank]
            raise ReshardError(
                f"{who} has heard something else of what {me} holds than it has said: connect again"
            )
        pieces = unpack_array(request[DIGEST_BYTES:], f"what {who} asks for", (ASKED, ASKED_OF_BLOCKS))
        check_asked(pieces, self.extents, who, self.source.name_of)
        return pieces

    def tell_if_moved(self) -> bool:
        """Look where the memory is now; whether it has moved, which the others are then told.

        Raises ReshardError where parameters are not in the device's memory.
        """
        now = self._look()
        moved = now != self.told
        if moved:
            self.source.check_memory(self.device)
            self.told = now
            self._tell()
        return moved

    def forget(self) -> None:
        """After a refit that failed: tell everything again at the next."""
        self.told = [], []

    def _look(self) -> tuple[list[int], list[Allocation]]:
        """Where the parameters are now, and the allocations that other processes map as the driver knows
        them."""
        addresses, frees = (
            self.source.addresses(),
            frees_of(self.device) if self.device.type == "cuda" else None,
        )
        before, allocations = self.told
        unfreed, self.frees = frees is not None and frees == self.frees, frees
        # Asking the driver takes a while for each; what was never freed is what it was.
        if addresses == before and (
            unfreed or all(generation_of(a.base) == a.generation for a in allocations)
        ):
            return addresses, allocations
        return addresses, allocations_of(self.source, self._read_by_others())

    def _read_by_others(self) -> list[int]:
        """The shards of this rank that other processes read where they lie, if they can."""
        me = self.members.rank
        readers = [
            asked[:, SHARD]
            for rank, asked in self.asked.items()
            if self.agreed.way(me, rank, True) == CUDA_IPC
        ]
        return np.unique(np.concatenate(readers)).tolist() if readers else []

    def _tell(self) -> None:
        """Publish where the shards lie, with handles to what another process is going to read: each takes the
        driver a while."""
        allocations = self.told[1]
        hidden = [a for a in allocations if not is_exportable(a.base)]
        if hidden and self.agreed.backend == CUDA_IPC:
            raise ReshardError(
                "the trainer's weights lie in memory that cannot be shared with other "
                "processes (expandable segments, or a virtual memory pool): use "
                "backend='auto', or unset PYTORCH_CUDA_ALLOC_CONF"
            )
        self.exported = not hidden
        memory = memory_of(self.source, allocations if self.exported else [])
        regions, rest = pack_array(memory.pop("regions")), pack_json(memory | {"exported": self.exported})
        self.memory_digest = digest(regions, rest)
        self.members.post("regions", regions)
        self.members.post("memory", rest)

    def ways(self) -> dict[int, str]:
        """How inference ranks get their pieces from here."""
        return {rank: self.agreed.way(self.members.rank, rank, self.exported) for rank in self.asked}

    def outgoing(self) -> dict[str, dict[int, Outgoing]]:
        """What this rank sends, by way and inference rank."""
        found: dict[str, dict[int, Outgoing]] = {way: {} for way in SENT}
        memory = located(self.source.regions)
        for rank, way in self.ways().items():
            if way in SENT:
                found[way][rank] = self.sent(memory, self.asked[rank])
        return found

    def sent(self, memory: np.ndarray, asked: np.ndarray) -> Outgoing:
        """What an inference rank gets that asks for these pieces; `memory` is `located` of this rank's regions."""
        asked = as_sent(asked)
        table, n = source_table(memory, asked), len(asked)
        if asked.shape[1] == ASKED:
            return Outgoing(
                table, np.full(n, AT_ONCE), np.zeros((n, 3), np.int64), np.zeros((0, PLACES), np.int64)
            )
        blocks = asked[BLOCKWISE[asked[:, ENCODED]]]
        compile_block_kernels(blocks[:, ENCODED], True, self.device)
        places = places_of_requests(blocks[:, WHERE], blocks[:, EXTENT], blocks[:, ENCODED])
        return Outgoing(table, asked[:, ROUND], asked[:, WHERE], places)
