"""Buffers that a thread uses again and again."""

import threading

import numpy as np

SMALLEST = 512 << 10  # bytes of a buffer


class Scratch(threading.local):
    """Buffers that a thread uses again and again: fresh memory costs a page fault every four kilobytes."""

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}

    def array(self, use: str, rows: int, width: int) -> np.ndarray:
        """Return bytes ``[rows, width]``, valid until the thread asks for the same `use` again."""
        buffer = self.buffers.get(use)
        if buffer is None or buffer.size < rows * width:
            buffer = self.buffers[use] = np.empty(max(rows * width, SMALLEST), np.uint8)
        return buffer[: rows * width].reshape(rows, width)
