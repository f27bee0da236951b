"""Compile the kernels that nearly every refit launches, in a thread, while both sides plan."""

import threading
from collections.abc import Iterable

import torch

from reshard.refit.copying.kernels import compile_copy, compile_digest
from reshard.refit.fp8_blocks.kernels import compile_quantize
from reshard.refit.fp8_blocks.tables import BlockKernel


def compile_ahead(device: torch.device, sizes: Iterable[int], blocks: bool, size: int) -> threading.Thread:
    """Begin to compile what nearly every refit launches, in a thread, since planning takes as long.

    `sizes` are the bytes of elements that are copied. With `blocks` an engine serves fp8 blocks, which are made
    of elements of `size` bytes. A kernel that is needed before it is compiled is waited for.
    """

    def compile_all() -> None:
        if blocks:  # first, since a look at vLLM's arithmetic waits for it
            compile_quantize(BlockKernel(True, size=size), device)
        compile_copy(16, device)
        for word, unit in ((8, 8), *((size, size) for size in sizes)):
            compile_digest(word, unit, device)

    thread = threading.Thread(target=compile_all, name="reshard compiles")
    thread.start()
    return thread
