"""The account of every tensor that an engine serves from: a refit brings it, vLLM derives it from
what was brought, or it is left alone for a named reason. A tensor without an account would serve
from whatever it held before.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError, listed

BROUGHT, DERIVED, LEFT_ALONE = "brought", "derived", "left alone"


class Account(NamedTuple):
    """`what` becomes of a tensor (`BROUGHT`, `DERIVED`, `LEFT_ALONE`), and `how`, or why."""

    what: str
    how: str


CACHE_SCALE = Account(LEFT_ALONE, "a scale of the attention's cache, which comes with a checkpoint or is 1")
FROM_CONFIG = Account(LEFT_ALONE, "vLLM computes it from the config")
PROCESSED = Account(DERIVED, "vLLM's own processing makes it of the weights that a refit brings to its layer")
ABSORBED = Account(DERIVED, "vLLM's own processing makes it of kv_b_proj")
ADAPTERS = Account(LEFT_ALONE, "the adapters of a layer, which hold what vLLM has loaded into them")
CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale"})


def account_for(
    modules: Mapping[str, torch.nn.Module],
    tensors: Mapping[str, torch.Tensor],
    brought: Mapping[str, torch.Tensor],
    reloaded: Collection[str],
    attentions: Collection[str],
) -> dict[str, Account]:
    """Return the account of every one of an engine's `tensors`, its parameters and buffers by name.

    `brought` are the tensors that a refit writes to, by name. Of the modules named in `reloaded`
    vLLM's processing makes all parameters anew, of those in `attentions` the matrices that are made
    of ``kv_b_proj``. Raises ReshardError, naming them, for tensors that have no account.
    """
    memory = _Memory(brought)
    accounts: dict[str, Account] = {}
    unknown = []
    for name, tensor in tensors.items():
        layer, _, key = name.rpartition(".")
        module = modules[layer]
        owner = memory.owner_of(tensor)
        if layer in reloaded and key in module._parameters:
            accounts[name] = PROCESSED
        elif name in brought:
            accounts[name] = Account(BROUGHT, "from the trainer")
        elif owner:
            accounts[name] = Account(
                DERIVED, f"a view of {owner.rpartition('.')[2]} of its layer or of another"
            )
        elif layer in attentions and key in module._parameters:
            accounts[name] = ABSORBED
        elif key.lstrip("_") in CACHE_SCALES:
            accounts[name] = CACHE_SCALE
        elif _is_computed(module, key, tensor):
            accounts[name] = FROM_CONFIG
        else:
            unknown.append(name)
    if unknown:
        raise ReshardError(
            f"a refit would bring nothing into {listed(unknown, 3)}, and this vLLM would serve whatever is there: its loader "
            f"takes none of the published tensors that the mapping table knows for them; add their rows to the family's table, or "
            f"serve without a refit"
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


def _is_computed(module: torch.nn.Module, key: str, tensor: torch.Tensor) -> bool:
    """Tell whether a buffer is one that no checkpoint has, or a table of whole numbers, such as
    that of experts."""
    if key not in module._buffers:
        return False
    return key in module._non_persistent_buffers_set or not tensor.is_floating_point()


class _Memory:
    """The memory of named tensors, to look up which of them a view lies in."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        spans = sorted((*_span(tensor), name) for name, tensor in named.items() if tensor.numel())
        self.starts = [start for start, _, _ in spans]
        self.spans = spans

    def owner_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the tensor that all of this one's memory belongs to, empty where there
        is none."""
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
