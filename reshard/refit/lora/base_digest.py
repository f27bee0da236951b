"""Digests of the weights below an adapter: the trainer's are sent once, and proven unchanged before each later
refit of the adapter; the engine's are proven unchanged where a refit is verified. Buffers count too: Megatron moves
a router's ``expert_bias`` at every step."""

import numpy as np

from reshard.device.cuda import frees_of, is_mapped
from reshard.refit.codecs import PLAIN
from reshard.refit.copying.addresses import (
    COLUMN_COUNT,
    REQUEST_CODEC,
    REQUEST_COLUMNS,
    ROW_COUNT,
    SHARD,
    region_addresses,
    source_table,
)
from reshard.refit.copying.digests import Digests
from reshard.refit.copying.tables import CODEC, ROWS, SRC, SRC_PITCH, WIDTH, empty_table
from reshard.refit.engine import Engine
from reshard.refit.protocol.encoding import digest
from reshard.refit.sender import Sender


class BaseDigest:
    """The digest of all that a trainer's rank is asked for, from where that lies now.

    torch's own counters of changes would be cheaper, but do not see writes through ``.data``, or into the
    buffer of which a distributed optimizer's parameters are views.
    """

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self._made_for: tuple[list[int], int | None] | None = None  # addresses, torch's count of frees
        self._digests: Digests | None = None

    def take(self) -> bytes:
        """Return the digest of now. Every rank of the trainer calls this, within a transaction.

        Raises ReshardError if the weights are in memory that cannot be read.
        """
        source, device = self.sender.source, self.sender.device
        self.sender.sync_params()
        made_for = source.addresses(), frees_of(device) if device.type == "cuda" else None
        if self._digests is None or made_for != self._made_for:
            source.check_memory(device)
            self._digests, self._made_for = self._of_shards(), made_for
        with self.sender.group.reporting_alive():
            return digest(self._digests.result().tobytes())

    def _of_shards(self) -> Digests:
        """Return the digests of each shard of which some engine's rank gets a part."""
        asked = [requests[:, SHARD] for requests in self.sender.requests.values()]
        shards = np.unique(np.concatenate([np.zeros(0, np.int64), *asked]))
        sizes = self.sender.sizes.shapes[shards]
        requests = np.zeros((len(shards), REQUEST_COLUMNS), np.int64)
        requests[:, SHARD], requests[:, REQUEST_CODEC] = shards, PLAIN
        requests[:, [ROW_COUNT, COLUMN_COUNT]] = sizes
        table = source_table(region_addresses(self.sender.source.memory), requests)
        return Digests(table, requests[:, COLUMN_COUNT], self.sender.device)


class ServedDigest:
    """The digest of what an engine's rank serves below an adapter, from where that lies now.

    Its guard counts what the engine's own methods write. Writes through ``.data``, or in a function of
    ``LLM.apply_model``, show in the bits alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._made_for: list[tuple[int, int]] = []  # addresses and bytes
        self._digests: Digests | None = None

    def take(self) -> bytes:
        """Return the digest of now; empty if the engine's regions are not what it serves from, since it processes
        weights that arrive in them, or have no memory."""
        engine = self.engine
        if engine.staged_rounds:
            return b""
        tensors = engine.written_tensors()
        if tensors and tensors[0].device.type == "cuda" and not is_mapped(tensors[0].data_ptr()):
            return b""
        storages = {
            storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)
        }
        made_for = [*storages.items()]  # in an order that is not of where they lie
        if self._digests is None or made_for != self._made_for:
            table = empty_table(len(made_for))
            table[:, SRC], table[:, WIDTH] = np.array(made_for, np.int64).reshape(-1, 2).T
            table[:, SRC_PITCH], table[:, ROWS], table[:, CODEC] = table[:, WIDTH], 1, PLAIN
            self._digests, self._made_for = Digests(table, table[:, WIDTH], engine.device), made_for
        return digest(self._digests.result().tobytes(), "\n".join(sorted(engine.stale_derived())).encode())
