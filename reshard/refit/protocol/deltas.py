"""The state of each member's deltas, exchanged before a refit (``delta``): whose weights it has."""

from dataclasses import dataclass
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.protocol.encoding import MOST_ADDRESS, exchange_json, is_number, is_word


@dataclass(frozen=True)
class DeltaState:
    """A member's weights: those that a trainer's rank keeps as it sent them, or an engine's serves.

    `holds` is the transaction that brought them; None where they are not whole or not known, and `why` says
    why. `is_whole`, before a refit that is begun: a trainer's rank has packed all that it holds, and an engine's can
    take all beside what it serves, which is of this `version`.
    """

    holds: int | None
    why: str
    is_whole: bool = False
    version: int | None = None


def exchange_states(group: RefitGroup, own: DeltaState) -> list[DeltaState]:
    """Tell all members this one's state, and return each one's, by rank."""
    states = []
    for rank, fields in enumerate(exchange_json(group, "delta", vars(own))):
        if not makes_sense(fields):
            raise ReshardError(f"{group.names[rank]} says {fields!r:.80} of its deltas, which makes no sense")
        states.append(DeltaState(**fields))
    return states


def makes_sense(fields: Any) -> bool:
    """Return True for the fields of a `DeltaState`, each within its bounds."""
    if not isinstance(fields, dict) or fields.keys() != DeltaState.__dataclass_fields__.keys():
        return False
    numbers = (fields["holds"], fields["version"])
    return (
        all(number is None or is_number(number, 0, MOST_ADDRESS) for number in numbers)
        and is_word(fields["why"])
        and isinstance(fields["is_whole"], bool)
    )
