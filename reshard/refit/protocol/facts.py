"""What trainers' ranks say of their weights beside them (``facts``), for engines that have to know it."""

from collections import Counter
from collections.abc import Sequence

from reshard.comm.group import RefitGroup

FACTS = "facts"


def post_facts(group: RefitGroup, facts: bytes | None) -> None:
    """Post this rank's facts; None for nothing to say."""
    group.post(FACTS, facts or b"")


def read_facts(group: RefitGroup, trainers: Sequence[int]) -> dict[str, bytes]:
    """Return the facts of the trainers' ranks that have something to say, by their names, and by their ranks too where
    several have one name, as those of a pod."""
    counts = Counter(group.names[rank] for rank in trainers)
    names = [
        group.names[rank] if counts[group.names[rank]] == 1 else f"{group.names[rank]} (rank {rank})"
        for rank in trainers
    ]
    payloads = group.read_all(FACTS, trainers)
    return {name: payload for name, payload in zip(names, payloads, strict=True) if payload}
