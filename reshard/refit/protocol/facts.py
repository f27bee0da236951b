"""What trainers' ranks say of their weights beside them (``facts``), for engines that have to know it."""

from collections.abc import Sequence

from reshard.comm.group import RefitGroup

FACTS = "facts"


def post_facts(group: RefitGroup, facts: bytes | None) -> None:
    """Post this rank's facts; None for nothing to say."""
    group.post(FACTS, facts or b"")


def read_facts(group: RefitGroup, trainers: Sequence[int]) -> dict[str, bytes]:
    """Return the facts of the trainers' ranks that have something to say, by their names."""
    payloads = group.read_all(FACTS, trainers)
    return {group.names[rank]: payload for rank, payload in zip(trainers, payloads, strict=True) if payload}
