"""What each rank of an engine takes of the published tensors (``takes``) of which its loader alone says where they go:
a model that no mapping table covers, and a tower."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.comm.group import MOST_MEMBERS, RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.protocol.encoding import check_own, digest, is_number, pack_json, readable, unpack_json

TAKES = "takes"


class TakenTensors(NamedTuple):
    """The published tensors that a rank takes, by `names`, and where it is: its engine's tensor parallel size,
    pipeline stages, and which of these it is."""

    tp: int
    pp: int
    pp_rank: int
    names: frozenset[str]


def exchange_taken(
    group: RefitGroup, engines: Sequence[int], names: Sequence[str], own: TakenTensors
) -> dict[int, TakenTensors]:
    """Tell the engines' ranks what this one takes of all tensors, `names`, and return what each of them takes.

    Raises ReshardError if one says what makes no sense, or counts other tensors.
    """
    payload = _encoded(names, own)
    group.post(TAKES, payload)
    payloads = group.read_all(TAKES, engines)
    check_own(group, TAKES, payload, payloads[engines.index(group.rank)])
    decoded: dict[bytes, TakenTensors] = {}  # replicas say the same
    for rank, each in zip(engines, payloads, strict=True):
        if each not in decoded:
            decoded[each] = _decoded(each, names, group.names[rank])
    return {rank: decoded[each] for rank, each in zip(engines, payloads, strict=True)}


def _encoded(names: Sequence[str], taken: TakenTensors) -> bytes:
    bits = np.packbits([name in taken.names for name in names])
    return pack_json([taken.tp, taken.pp, taken.pp_rank, _digest(names), bits.tobytes().hex()])


def _decoded(payload: bytes, names: Sequence[str], who: str) -> TakenTensors:
    what = f"what {who} takes of the model"
    fields = unpack_json(payload, what)
    with readable(what):
        tp, pp, pp_rank, of_names, bits = fields
        if not all(is_number(size, 1, MOST_MEMBERS) for size in (tp, pp)) or not is_number(
            pp_rank, 0, pp - 1
        ):
            raise ValueError(f"stage {pp_rank!r:.20} of {pp!r:.20}")
        mask = np.frombuffer(bytes.fromhex(bits), np.uint8)
        if len(mask) != -(-len(names) // 8):
            raise ValueError(f"{len(mask)} bytes for {len(names)} tensors")
    if of_names != _digest(names):
        raise ReshardError(
            f"{who} counts other tensors in the model than the engines' other ranks: give all the same transformers"
        )
    has = np.unpackbits(mask, count=len(names))
    return TakenTensors(tp, pp, pp_rank, frozenset(np.array(names)[has.astype(bool)].tolist()))


def _digest(names: Sequence[str]) -> str:
    return digest("\n".join(names).encode()).hex()
