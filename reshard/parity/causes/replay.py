"""Let routers send tokens to given experts: what is left of a difference then is not one of routing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reshard.core.errors import ReshardError, listed
from reshard.parity.routing import Choices
from reshard.parity.systems.base import ForwardSystem, System


@contextmanager
def replayed(system: System, choices: Choices | None) -> Iterator[None]:
    """Let the routers of a system send the tokens of one prompt to these experts while the context is open; its last
    token, of whose choice nothing depends, goes where its router sends it. Without choices nothing
    changes. Raises ReshardError at the end if a router does not choose by ``topk``, and went where it would."""
    if choices is None:
        yield
        return
    assert isinstance(system, ForwardSystem)
    experts = {layer: choices.experts[:, index] for index, layer in enumerate(choices.layers)}
    handles, modes = [], {}
    for layer, router in system.routers().items():
        if layer not in experts:
            continue
        modes[layer] = _Chosen(torch.from_numpy(experts[layer]))
        handles += [
            router.register_forward_pre_hook(partial(_enter, modes, layer)),
            router.register_forward_hook(partial(_leave, modes, layer), always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    unused = [layer for layer, mode in modes.items() if not mode.replaced]
    if unused:
        raise ReshardError(f"the routers of layers {listed(map(str, unused), 3)} do not choose by torch.topk")


def _enter(modes: Mapping[int, "_Chosen"], layer: int, *_: Any) -> None:
    modes[layer].__enter__()


def _leave(modes: Mapping[int, "_Chosen"], layer: int, *_: Any) -> None:
    modes[layer].__exit__(None, None, None)


class _Chosen(TorchFunctionMode):
    """Takes these `experts` ``[tokens, top k]`` where a router takes the best of all by ``topk``, with the values that
    they have there. Routers that choose groups first do so by ``topk`` of fewer."""

    def __init__(self, experts: torch.Tensor) -> None:
        super().__init__()
        self.experts, self.replaced = experts, False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        values, indices = result
        scores = args[0]
        tokens, count = self.experts.shape
        if indices.shape[-1] != count or indices.numel() != (tokens + 1) * count:
            return result
        taken = indices.reshape(-1, count).clone()
        taken[:tokens] = self.experts.to(taken.device)
        of_taken = scores.reshape(-1, scores.shape[-1]).gather(1, taken)
        of_taken, order = of_taken.sort(dim=-1, descending=True)
        self.replaced = True
        return type(result)((of_taken.reshape(values.shape), taken.gather(1, order).reshape(indices.shape)))
