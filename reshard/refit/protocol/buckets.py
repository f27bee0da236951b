"""The number of partners with which each member exchanges bytes by a transport (``partners/TRANSPORT``),
and of buckets in each round (``rounds``)."""

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.protocol.encoding import MOST_ADDRESS, exchange_json, is_number
from reshard.refit.protocol.requests import MOST_ROUNDS

MOST_BUCKETS = 1 << 20  # of one of the engines' rounds; above all that is of use
MOST_LINES = 1 << 20  # of one member; of each pair of members there are several


def exchange_partner_counts(group: RefitGroup, partners: int, transport: str) -> list[int]:
    """Tell all members with how many partners this one exchanges bytes by a transport, those to which it sends and
    those from which it gets some, a member once for each line; return what each says."""
    counts = exchange_json(group, f"partners/{transport}", partners)
    for rank, count in enumerate(counts):
        if not is_number(count, 0, MOST_LINES):
            raise ReshardError(
                f"{group.names[rank]} says that it has {count!r:.40} partners, which makes no sense"
            )
    return counts


def exchange_relays(group: RefitGroup, size: int, relays: int) -> list[tuple[int, int]]:
    """Tell all members how many bytes come here in the largest line, and how many ranks these pass before; return what
    each says."""
    said = exchange_json(group, "relays", [size, relays])
    for rank, pair in enumerate(said):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not is_number(pair[0], 0, MOST_ADDRESS)
            or not is_number(pair[1], 0, len(said))
        ):
            raise ReshardError(f"{group.names[rank]} says {pair!r:.80} of its relays, which makes no sense")
    return [(size, relays) for size, relays in said]


def exchange_bucket_counts(group: RefitGroup, counts: Mapping[int, int]) -> dict[int, int]:
    """Tell all members how many buckets this one fills in each of the engines' rounds, and return
    how many each round takes."""
    return most_buckets(exchange_json(group, "rounds", [*counts.items()]), group.names)


def most_buckets(lists: Sequence[Any], names: Mapping[int, str]) -> dict[int, int]:
    """Return how many buckets each of the engines' rounds takes, from all members' lists of [round, buckets].

    Both ends of a pair cut the same pieces alike, so two members need the most. Raises ReshardError
    where only one does.
    """
    counts: dict[int, list[tuple[int, int]]] = {}
    for rank, pairs in enumerate(lists):
        if (
            not isinstance(pairs, list)
            or len(pairs) > MOST_ROUNDS + 1
            or not all(map(_counts_buckets, pairs))
        ):
            raise ReshardError(f"{names[rank]} says {pairs!r:.80} of its buckets, which makes no sense")
        for number, count in pairs:
            counts.setdefault(number, []).append((count, rank))
    most = {}
    for number, of_members in counts.items():
        (largest, rank), *others = sorted(of_members, reverse=True)
        if largest and (not others or others[0][0] != largest):
            raise ReshardError(
                f"{names[rank]} alone fills {largest:,} buckets in round {number}: connect again"
            )
        most[number] = largest
    return most


def _counts_buckets(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return is_number(pair[0], UNSTAGED, MOST_ROUNDS) and is_number(pair[1], 0, MOST_BUCKETS)
