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

TOPK = (torch.topk, torch.Tensor.topk)


@contextmanager
def replayed(system: System, choices: Choices) -> Iterator[None]:
    """Let the routers of a system send the tokens of one prompt to these experts while the context is open; its last
    token, of whose choice nothing depends, goes where its router sends it. Raises ReshardError at the end if a
    router does not choose by ``topk``, and went where it would."""
    assert isinstance(system, ForwardSystem)
    experts = {layer: choices.experts[:, index] for index, layer in enumerate(choices.layers)}
    routers = {layer: router for layer, router in system.routers().items() if layer in experts}
    modes = {layer: _Chosen(torch.from_numpy(experts[layer])) for layer in routers}
    with entered(routers, modes):
        yield
    unused = [layer for layer, mode in modes.items() if not mode.replaced]
    if unused:
        raise ReshardError(f"the routers of layers {listed(map(str, unused), 3)} do not choose by torch.topk")


@contextmanager
def entered(modules: Mapping[int, torch.nn.Module], modes: Mapping[int, TorchFunctionMode]) -> Iterator[None]:
    """Run the forwards of each layer's module inside its mode while the context is open."""
    handles: list[Any] = []
    for layer, module in modules.items():
        handles += [
            module.register_forward_pre_hook(partial(_enter, modes[layer])),
            module.register_forward_hook(partial(_leave, modes[layer]), always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(mode: TorchFunctionMode, *_: Any) -> None:
    mode.__enter__()


def _leave(mode: TorchFunctionMode, *_: Any) -> None:
    mode.__exit__(None, None, None)


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
        if function not in TOPK:
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
