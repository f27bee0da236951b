"""Compile the kernels that nearly every refit launches, in a thread, while both sides plan."""

import threading
from collections.abc import Callable, Iterable

import torch

from reshard.refit.copying.kernels import compile_copy, compile_digest


def compile_ahead(
    device: torch.device, sizes: Iterable[int], first: Callable[[], None] | None
) -> threading.Thread:
    """Begin to compile what nearly every refit launches, in a thread, since planning takes as long.

    `sizes` are the bytes of elements that are copied; `first` compiles what blocks are made with, where an engine
    serves such. A kernel that is needed before it is compiled is waited for.
    """

    def compile_all() -> None:
        if first is not None:  # a look at vLLM's arithmetic waits for it
            first()
        compile_copy(16, device)
        for word, unit in ((8, 8), *((size, size) for size in sizes)):
            compile_digest(word, unit, device)

    thread = threading.Thread(target=compile_all, name="reshard compiles")
    thread.start()
    return thread
