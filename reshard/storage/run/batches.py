"""Which worker does which jobs when: batches of neighbors, taken so that few write into one file at
a time."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

# What the smallest job counts as.
NAME_BYTES = 128 << 10


@dataclass
class Batch:
    """Jobs that a worker does one after the other, their bytes, and the files that they write into."""

    files: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    size_bytes: int = 0


class Batches:
    """All jobs, in batches.

    Neighbors that write into the same files are together: they are neighbors on the disk, and their
    plans share pages of memory, which a forked worker copies when it counts references there.
    """

    def __init__(
        self, sizes: Mapping[str, int], files_of: Callable[[str], Iterable[str]], batch_bytes: int
    ) -> None:
        self.left: dict[tuple[str, ...], list[Batch]] = {}
        self.left_bytes: Counter[tuple[str, ...]] = Counter()
        self.writers: Counter[str] = Counter()
        for name, size in sizes.items():
            files, cost = tuple(sorted(files_of(name))), max(size, NAME_BYTES)
            batches = self.left.setdefault(files, [])
            if not batches or batches[-1].size_bytes + cost > batch_bytes:
                batches.append(Batch(files))
            batches[-1].names.append(name)
            batches[-1].size_bytes += cost
            self.left_bytes[files] += cost
        self.sharing: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for files, batches in self.left.items():
            # The largest is taken first, from the end, so that no worker is left alone with it.
            batches.sort(key=lambda batch: -batch.size_bytes)
            batches.reverse()
            for file in files:
                self.sharing[file].append(files)
        # Groups of files by what they promise; one whose promise has changed is looked at again
        # when it comes up, or at once where it has become better.
        self.number = count()
        self.order: list[tuple[int, int, int, tuple[str, ...]]] = []
        for files in self.left:
            self._offer(files)

    def __len__(self) -> int:
        return sum(map(len, self.left.values()))

    def _promise(self, files: tuple[str, ...]) -> tuple[int, int]:
        return max((self.writers[f] for f in files), default=0), -self.left_bytes[files]

    def _offer(self, files: tuple[str, ...]) -> None:
        if files in self.left:
            heappush(self.order, (*self._promise(files), next(self.number), files))

    def take(self) -> Batch | None:
        """Return the next batch, None at the end: of the files into which the fewest workers write,
        since a kernel lets one at a time write into a file; of those with the most to do."""
        while self.order:
            *promise, _, files = heappop(self.order)
            if files not in self.left:
                continue
            if tuple(promise) != self._promise(files):
                if tuple(promise) < self._promise(files):
                    self._offer(files)
                continue
            batch = self.left[files].pop()
            self.left_bytes[files] -= batch.size_bytes
            if not self.left[files]:
                del self.left[files]
            self.writers.update(files)
            self._offer(files)
            return batch
        return None

    def give_back(self, batch: Batch) -> None:
        """Note that a worker is done with a batch."""
        self.writers.subtract(batch.files)
        for file in batch.files:
            for files in self.sharing[file]:
                self._offer(files)
