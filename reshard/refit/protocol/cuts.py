"""Where a trainer's rank has pieces of it cut (``cuts``): see `reshard.refit.cuts`. Its answer says whether there are
any (`requests.RequestsRead`)."""

from collections.abc import Mapping

import numpy as np

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.cuts import CUT_AT, CUT_CODEC, CUT_COLUMNS, CUT_SHARD, CUT_STRIP, OF_ROWS, no_cuts
from reshard.refit.protocol.encoding import (
    DIGEST_BYTES,
    MOST_ADDRESS,
    digest,
    pack_array,
    readable,
    unpack_array,
)

NO_CUTS = bytes(DIGEST_BYTES)  # in place of a digest


def post_cuts(group: RefitGroup, cuts: np.ndarray) -> bytes:
    """Post cuts, and return their digest, or `NO_CUTS`, with which nobody reads them."""
    payload = pack_array(cuts)
    group.post("cuts", payload)
    return digest(payload) if len(cuts) else NO_CUTS


def read_cuts(group: RefitGroup, expected_digests: Mapping[int, bytes]) -> dict[int, np.ndarray]:
    """Return the cuts of trainers' ranks, which have said these digests of them. Raises ReshardError where some make no
    sense, or have another digest."""
    cuts = {rank: no_cuts() for rank in expected_digests}
    posted = [rank for rank, expected in expected_digests.items() if expected != NO_CUTS]
    for rank, payload in zip(posted, group.read_all("cuts", posted) if posted else (), strict=True):
        who = group.names[rank]
        if digest(payload) != expected_digests[rank]:
            raise ReshardError(f"what {who} says of cuts did not arrive as it was sent: connect again")
        cuts[rank] = _decoded(payload, f"what {who} says of cuts")
    return cuts


def _decoded(payload: bytes, what: str) -> np.ndarray:
    cuts = unpack_array(payload, what, [CUT_COLUMNS])
    with readable(what):
        numbers = cuts[:, [CUT_SHARD, CUT_CODEC, CUT_AT]]
        if numbers.min(initial=0) < 0 or cuts[:, CUT_STRIP].min(initial=0) < OF_ROWS:
            raise ValueError("a number below 0")
        if cuts.max(initial=0) >= MOST_ADDRESS:
            raise ValueError(f"{cuts.max():,}")
    return cuts
