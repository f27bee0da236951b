"""Which of a module's parameters a forward uses."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Addresses(TorchDispatchMode):
    """Notes the addresses of all tensors that operators are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.addresses |= {
            leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        return function(*args, **kwargs)


@contextmanager
def watched(module: torch.nn.Module) -> Iterator[set[str]]:
    """Yield a set that has, once the context has ended, the names of the module's parameters that were not used: no
    operator was called with any part of them, and their own module did not run, whose kernels may be no operators."""
    unused: set[str] = set()
    ran: set[torch.nn.Module] = set()
    handles = [each.register_forward_hook(lambda each, *_: ran.add(each)) for each in module.modules()]
    try:
        with _Addresses() as noted:
            yield unused
    finally:
        for handle in handles:
            handle.remove()
    addresses = sorted(noted.addresses)
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False) if owner not in ran else ():
            start = parameter.data_ptr()
            end = start + parameter.numel() * parameter.element_size()
            index = bisect_left(addresses, start)
            if index == len(addresses) or addresses[index] >= end:
                unused.add(f"{path}.{name}" if path else name)
