"""The account of every tensor that an engine serves from: a refit brings it, the engine derives it
from what was brought, or it is left alone for a named reason.

A tensor without an account would serve whatever it held before, in silence: many loaders skip
names that they do not know. So an engine calls `account_for` when it is made.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.refit.engine import TOWER_AS_LOADED

BROUGHT, DERIVED, LEFT_ALONE = "brought", "derived", "left alone"


class Account(NamedTuple):
    """`what` becomes of a tensor (`BROUGHT`, `DERIVED`, `LEFT_ALONE`), and `how`, or why."""

    what: str
    how: str


FROM_TRAINER = Account(BROUGHT, "from the trainer")
OF_DRAFTER = Account(BROUGHT, "of the drafter, from the trainer")
OF_TOWER = Account(LEFT_ALONE, TOWER_AS_LOADED)
SCALE_OF_CACHE = Account(
    LEFT_ALONE, "a scale of the attention's cache, which comes with a checkpoint or is 1"
)


def account_for(
    engine: str,
    tensors: Mapping[str, torch.Tensor],
    brought: Mapping[str, torch.Tensor],
    others: Mapping[str, Account],
    unfilled: Iterable[str] = (),
) -> dict[str, Account]:
    """Return the account of every one of an engine's `tensors`, its parameters and buffers by name.

    `brought` are the tensors that a refit writes to, by name; views of them need no account of
    their own. `others` are the accounts of the rest, which the engine knows. `unfilled` are the
    names of what it would derive tensors from, and no refit brings. Raises ReshardError, naming
    them, for the unfilled, and for tensors that have no account; `engine` is its name there.
    """
    memory = _Memory(brought)
    accounts: dict[str, Account] = {}
    unknown = list(unfilled)
    for name, tensor in tensors.items():
        is_view = name not in brought and memory.owner_of(tensor)
        if name in others and not (is_view and others[name].what == LEFT_ALONE):
            accounts[name] = others[name]
        elif name in brought:
            accounts[name] = FROM_TRAINER
        elif owner := memory.owner_of(tensor):
            parameter = owner.rpartition(".")[2]
            accounts[name] = Account(DERIVED, f"a view of {parameter} of its layer or of another")
        else:
            unknown.append(name)
    if unknown:
        raise ReshardError(
            f"a refit would bring nothing into {listed(unknown, 3)}, and this {engine} would serve whatever "
            f"is there: its loader takes none of the published tensors that the mapping table knows for "
            f"them; add their rows to the family's table, or serve without a refit"
        )
    return accounts


def summary(accounts: Mapping[str, Account]) -> list[dict[str, object]]:
    """Return, for logs, how many tensors have each account, and the name of the first of them."""
    counts, first = Counter(accounts.values()), dict[Account, str]()
    for name, account in accounts.items():
        first.setdefault(account, name)
    return [
        {"what": account.what, "how": account.how, "tensors": n, "first": first[account]}
        for account, n in counts.items()
    ]


class _Memory:
    """The memory of named tensors, to look up which of them a view lies in."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        spans = sorted((*_span(tensor), name) for name, tensor in named.items() if tensor.numel())
        self.starts = [start for start, _, _ in spans]
        self.spans = spans

    def owner_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the tensor that all of this one's memory belongs to, or an empty string."""
        if not tensor.numel():
            return ""
        start, end = _span(tensor)
        index = bisect_right(self.starts, start) - 1
        if index < 0 or end > self.spans[index][1]:
            return ""
        return self.spans[index][2]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor, and the one after its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
