"""Two ranks of a trainer that agree on where to meet their engines."""

from types import SimpleNamespace

from reshard.comm.ranks import on_first_rank
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import WeightSync
from tests.starting.ranks import caught


def meetings(rank: int) -> list:
    """What this rank gets at a first sync; at one where all are connected; at one where the second rank alone is not;
    and where the first rank has no address."""
    sync = WeightSync(SyncOptions(timeout=7.0))
    agreed = lambda: sync.agreed_meeting(5, lambda: f"host:{rank}")  # noqa: E731
    first = agreed()
    sync.link = SimpleNamespace()  # type: ignore[assignment]
    connected = agreed()
    sync.link = None if rank else sync.link
    anew = agreed()
    return [first, connected, anew, caught(lambda: sync.agreed_meeting(5, lambda: fails(rank)))]


def asked(rank: int) -> list:
    """What this rank hears of calls that the first rank makes, one of which fails."""
    made: list[int] = []

    def call() -> str:
        made.append(rank)
        return f"made by {rank}"

    return [on_first_rank(call), made, caught(lambda: on_first_rank(lambda: fails(rank)))]


def fails(rank: int) -> str:
    """Raise what a framework might."""
    raise OSError(f"no port for {rank}\nand more")
