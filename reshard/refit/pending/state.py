"""What a member can bring or take beside what is served, and what all members agree on by that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.refit.agreement import Agreement
from reshard.refit.changes.choice import Choice, RefitChain
from reshard.refit.changes.sent import WHOLE
from reshard.refit.codecs import CODECS
from reshard.refit.copying.addresses import REQUEST_CODEC
from reshard.refit.protocol.deltas import DeltaState
from reshard.refit.receiver import Receiver
from reshard.refit.reporting.digest import RefitDigest
from reshard.refit.reporting.log import RefitLog
from reshard.refit.routes import NCCL
from reshard.refit.sender import Sender
from reshard.refit.transports.together import Transports
from reshard.refit.verification import ReceivedDigests, SentDigests


class Linked(Protocol):
    """A link (`reshard.refit.link.Link`), as far as its refits that are begun need it."""

    group: RefitGroup
    agreed: Agreement
    device: torch.device
    number: int
    refits: int
    sender: Sender | None
    receiver: Receiver | None
    sent_digests: SentDigests | None
    received_digests: ReceivedDigests | None
    transports: Transports
    chain: RefitChain
    digest: RefitDigest
    log: RefitLog
    below: Any
    keep_mapped: bool
    pending_bytes: int
    version: int | None
    broken: bool

    def check_open(self) -> None:
        """Raise ReshardError once it is closed."""

    def bounded(self, work: Callable[[], Any]) -> None:
        """Do work in which a partner may die or stall."""

    def clean_up(self) -> None:
        """End and give back what a refit that has failed leaves."""


def state_of(link: Linked) -> DeltaState:
    """Return whether this member has the weights on which changes build, and takes part in the exchange of these
    alone; and whether in one of all."""
    moved = False
    if not link.agreed.delta:
        return DeltaState(None, "the connection has no deltas (delta=True)")
    if link.below is not None:
        return DeltaState(None, "it is that of an adapter")
    routes: set[str] = set()
    if link.sender is not None:
        routes.update(link.sender.routes().values())
        moved = link.sender.source.addresses() != link.sender.posted[0]
    if link.receiver is not None:
        routes.update(link.receiver.routes().values())
        moved = link.receiver.has_moved() or moved
        if link.receiver.engine.cannot_switch:
            return DeltaState(None, link.receiver.engine.cannot_switch)
        if link.receiver.rounds:
            return DeltaState(None, "it quantizes or transposes weights when they have arrived")
    if others := sorted(routes - {NCCL}):
        return DeltaState(None, f"some of its bytes go by {others[0]} (backend='nccl')")
    state = link.chain.state(link.broken, moved)
    if state.holds is not None and moved:
        return DeltaState(None, "its parameters were moved")
    # An engine of no version has nothing that requests could go on with, or somebody writes into it.
    serves = link.receiver is None or _can_come_back(link, link.receiver)
    sends_changes = link.sender is not None and state.holds is not None
    is_whole = serves and not (moved or link.broken or sends_changes)
    version = link.receiver.engine.version if link.receiver is not None else None
    return replace(state, is_whole=is_whole, version=version)


def _can_come_back(link: Linked, receiver: Receiver) -> bool:
    """Return True if an engine's rank serves a version, which exchanging all with it would keep bit for bit: where
    elements are cast as they are written, those of another trainer may not be casts of any."""
    guard, chain = receiver.engine.guard, link.chain
    if guard.version is None:
        return False
    if link.version is not None and guard.writes == chain.writes:
        return True
    used = {number for of in receiver.pieces.values() for number in np.unique(of.requests[:, REQUEST_CODEC])}
    return all(CODECS[number].destination.size <= CODECS[number].source.size for number in used)


def choice_of(link: Linked, states: list[DeltaState]) -> tuple[Choice, int | None]:
    """Return what all members do by their states, and since when changes are exchanged: `WHOLE` for all; None where
    nothing is."""
    choice = link.chain.decide(states, link.group)
    since = choice.since
    if since is None and all(states[rank].is_whole for rank in link.agreed.trainers):
        short = [rank for rank in link.agreed.engines if not states[rank].is_whole]
        if short:
            why = states[short[0]].why or "it could not go back to what it serves"
            return Choice(None, f"{link.group.names[short[0]]}: {why}"), None
        choice, since = Choice(None, f"all is sent: {choice.reason}"), WHOLE
    served = {states[rank].version for rank in link.agreed.engines}
    if since is not None and (len(served) > 1 or None in served):
        return Choice(None, "engines serve different versions, or none"), None
    return choice, since
