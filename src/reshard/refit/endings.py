"""How long the first member's store outlives its `Members`.

The others ask it how the last turn ended, and who comes late asks it whether the turn has been given up. So a store that
nobody uses here any more is kept until all others know, or some minutes; and a process that ends waits a moment for them.
"""

import ctypes
import os
import threading
import time
import weakref
from multiprocessing.util import Finalize

import torch.distributed as dist

LINGER_SECONDS = 3.0  # at the end of the process, in all
KEPT_SECONDS = 600.0  # or as long as members wait for each other, where that is longer


class Ending:
    """How the last turn of some members ended: `seen` is the key under which the others count themselves who know."""

    def __init__(self, store: dist.Store, size: int, timeout: float) -> None:
        self.store, self.size, self.kept_seconds = store, size, max(KEPT_SECONDS, timeout)
        self.seen = ""
        self.left: float | None = None  # when the members of this process were no more

    def leave(self) -> None:
        """The members of this process are no more."""
        self.left = time.monotonic()

    def is_known(self) -> bool:
        """Whether all others know, or the store can tell nobody."""
        try:
            return not self.seen or self.store.add(self.seen, 0) >= self.size - 1
        except (RuntimeError, dist.DistError):
            return True

    def is_over(self) -> bool:
        """Whether nobody needs the store any more."""
        if self.left is None:
            return False
        return self.is_known() or time.monotonic() - self.left > self.kept_seconds


class Endings:
    """Those that this process owes others. It holds the stores; whoever else does is not asked."""

    def __init__(self) -> None:
        self.kept: list[Ending] = []
        self.lock, self.lingers = threading.Lock(), False
        os.register_at_fork(after_in_child=self._leave_to_the_other)

    def begin(self, members: object, store: dist.Store, size: int, timeout: float) -> Ending:
        """That of new members, of which this process is the first; the store is kept as long as they are, and longer. Those that
        are over are let go."""
        ending = Ending(store, size, timeout)
        weakref.finalize(members, ending.leave).atexit = False
        with self.lock:
            if not self.lingers:
                self.lingers = True
                # unlike atexit, in processes that multiprocessing has started too
                Finalize(None, self.linger, exitpriority=0)
            self.kept = [ending, *(one for one in self.kept if not one.is_over())]
        return ending

    def linger(self) -> None:
        """Stay until the others know how their last turns ended."""
        deadline = time.monotonic() + LINGER_SECONDS
        for ending in self.kept:
            while not ending.is_known() and time.monotonic() < deadline:
                time.sleep(1e-3)

    def _leave_to_the_other(self) -> None:
        """In a forked process: the stores of the one that forked it never end here, where no thread serves them, and their end
        would wait for that thread."""
        for ending in self.kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(ending.store))
        self.kept, self.lock, self.lingers = [], threading.Lock(), False


endings = Endings()
