"""Let converters that ask for a GPU, and use it for nothing but copies, run on the CPU, in each system's own Python.

Transformer Engine's layers refuse to be made without CUDA, though Megatron makes them on the CPU with
``use_cpu_initialization``; other code copies weights to ``"cuda"`` and back. Here the first check is answered with
yes while a layer is made, and "cuda" means the CPU. No kernel of Transformer Engine runs in a conversion.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Takes a device "cuda" in the arguments of torch's functions for the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args = tuple(_cpu(argument) for argument in args)
        return function(*args, **{name: _cpu(argument) for name, argument in (kwargs or {}).items()})


def _cpu(argument: Any) -> Any:
    is_cuda = (isinstance(argument, str) and argument.startswith("cuda")) or (
        isinstance(argument, torch.device) and argument.type == "cuda"
    )
    return "cpu" if is_cuda else argument


def allow() -> None:
    """Answer as a machine would whose GPU is its CPU."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    make, available = TransformerEngineBaseModule.__init__, torch.cuda.is_available

    def make_on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.is_available = lambda: True
        try:
            make(self, *args, **kwargs)
        finally:
            torch.cuda.is_available = available

    TransformerEngineBaseModule.__init__ = make_on_cpu
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    CudaIsCpu().__enter__()
