"""What each inference rank wants of a trainer's rank as others do (``alike/RANK``, ``sets/RANK``): see
`reshard.refit.relays.Alike`."""

from collections.abc import Mapping, Sequence

import numpy as np

from reshard.comm.group import RefitGroup
from reshard.refit.protocol.encoding import pack_array, pack_json, readable, unpack_array, unpack_json
from reshard.refit.relays import Alike


def post_alike(group: RefitGroup, alike: Mapping[int, Alike]) -> None:
    """Tell each inference rank what it wants of this one as others do."""
    ranks = {f"alike/{rank}": pack_json([*map(list, of_rank.ranks)]) for rank, of_rank in alike.items()}
    sets = {f"sets/{rank}": pack_array(of_rank.sets[:, None]) for rank, of_rank in alike.items()}
    group.post_all(ranks | sets)


def read_alike(group: RefitGroup, engines: Sequence[int], pieces: Mapping[int, int]) -> dict[int, Alike]:
    """Return what this rank wants of trainers' ranks, in so many `pieces` of each, as others do. Raises ReshardError if
    what one says makes no sense."""
    messages = (group.read_all(f"{key}/{group.rank}", pieces) for key in ("alike", "sets"))
    known = {*engines}
    return {
        trainer: _decoded(ranks, sets, group.rank, known, pieces[trainer], group.names[trainer])
        for trainer, ranks, sets in zip(pieces, *messages, strict=True)
    }


def _decoded(alike: bytes, of_pieces: bytes, own: int, known: set[int], pieces: int, who: str) -> Alike:
    """Return what rank `own` wants alike by the messages of `who`."""
    what = f"what {who} says of who wants the same"
    ranks = unpack_json(alike, what)
    sets = unpack_array(of_pieces, what, [1])[:, 0]
    with readable(what):
        if not isinstance(ranks, list) or len(sets) != pieces:
            raise ValueError(f"{len(sets)} pieces")
        for together in ranks:
            if not isinstance(together, list) or own not in together or not known.issuperset(together):
                raise ValueError(f"{together!r:.80}")
            if sorted({*together}) != together:
                raise ValueError(f"{together!r:.80}")
        if len(sets) and not 0 <= int(sets.min()) <= int(sets.max()) < len(ranks):
            raise ValueError("a set that there is not")
    return Alike(ranks, sets)


def alone(rank: int, pieces: int) -> Alike:
    """Return that nobody wants anything of a rank's pieces as it does, where nothing is passed on."""
    return Alike([[rank]], np.zeros(pieces, np.int64))
