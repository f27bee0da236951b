"""The ``.distcp`` files of a layout's ranks: where every chunk's container starts, known before a
byte is written."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.core.planner import Plan, Transfer
from reshard.formats import torch_dist, torch_zip
from reshard.megatron.checkpoint import Chunk, NewObject
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo, grouped_strips, strip_of
from reshard.storage.manifest import file_entry

# The first file of a rank starts with one empty ``_extra_state``, which all objects of the rank
# refer to.
NO_STATE = torch_zip.object_bytes([None])
# A kernel lets one process at a time write into a file: there are as many files as workers keep
# busy, unless they would get small.
FILES_AT_ONCE, SMALLEST_FILE_BYTES = 16, 1 << 30


def file_bytes(total_bytes: int) -> int:
    """Return how large the files of a checkpoint of this size should be."""
    return max(SMALLEST_FILE_BYTES, -(-total_bytes // FILES_AT_ONCE))


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk in its file: the container around its bytes, and the byte at which that starts."""

    chunk: Chunk
    dtype: Dtype
    container: torch_zip.Container
    offset: int

    @property
    def end(self) -> int:
        """Offset of the byte after the container."""
        return self.offset + self.container.size_bytes


class RankFiles:
    """The files of one iteration, whose name is `directory`; their names begin with `within`.

    Each rank has one or, where that would be much larger than `file_bytes`, several of about one
    size, as Megatron's own writer has. Raises ReshardError if the chunks of a key would have
    different dtypes: `.metadata` has one for each key.
    """

    def __init__(
        self,
        directory: str,
        within: str,
        chunks: Iterable[Chunk],
        objects: Iterable[NewObject],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.directory, self.within = directory, within
        self.objects = objects
        self.files: dict[str, list[PlacedChunk]] = {}
        by_rank: dict[int, list[tuple[Chunk, Dtype]]] = defaultdict(list)
        dtypes: dict[str, tuple[Dtype, str]] = {}
        default_dtype = next(iter(tensors.values())).dtype  # of zeros
        for chunk in sorted(chunks, key=lambda c: c.rank):
            for part in chunk.tensor.parts:
                dtype, first = dtypes.setdefault(chunk.key, (tensors[part.name].dtype, part.name))
                other = tensors[part.name].dtype
                if other != dtype:
                    raise ReshardError(
                        f"{first} is {dtype.name} and {part.name} is {other.name}, but Megatron's "
                        f"{chunk.key} has one dtype: pass --dtype"
                    )
            dtype, _ = dtypes.get(chunk.key, (default_dtype, ""))
            by_rank[chunk.rank].append((chunk, dtype))
        sizes = {
            rank: sum(prod(chunk.sizes) * dtype.size for chunk, dtype in group)
            for rank, group in by_rank.items()
        }
        wanted = file_bytes(sum(sizes.values()))
        for rank, group in by_rank.items():
            self._place(rank, group, sizes[rank] / max(1, round(sizes[rank] / wanted)))

    def _place(self, rank: int, group: list[tuple[Chunk, Dtype]], size_bytes: float) -> None:
        """Place the chunks of a rank one after the other into files of about this size."""
        placed: list[PlacedChunk] = []
        end, before = len(NO_STATE), 0  # bytes of this file, and of tensors in all files
        index = -1
        for chunk, dtype in group:
            if before >= (index + 1) * size_bytes:
                index += 1
                placed = self.files[f"{self.within}__{rank}_{index}.distcp"] = []
                end = len(NO_STATE) if index == 0 else 0
            container = _container(dtype, chunk.sizes)
            placed.append(PlacedChunk(chunk, dtype, container, end + -end % torch_zip.ALIGNMENT))
            end = placed[-1].end
            before += container.data_bytes

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, in the order of ranks."""
        return {name: placed[-1].end for name, placed in self.files.items()}

    def tensor_bytes(self) -> dict[str, int]:
        """Return the bytes of tensors in each rank's files, without the containers."""
        bytes_by_rank: dict[str, int] = defaultdict(int)
        for placed in self.files.values():
            for c in placed:
                bytes_by_rank[str(c.chunk.rank)] += c.container.data_bytes
        return dict(bytes_by_rank)

    def strips(self, plan: Plan) -> dict[str, list[Strip]]:
        """Return the strips of each canonical tensor, by a plan whose destination is these chunks."""
        paths = {name: Path(name) for name in self.files}
        places = {c.chunk.tensor.id: (paths[name], c) for name, placed in self.files.items() for c in placed}

        def strip(t: Transfer) -> Strip:
            path, c = places[t.dst]
            shape, start = c.chunk.tensor.shape, c.offset + len(c.container.head)
            return strip_of(t.box.offsets, t.box.lengths, t.dst_at, shape, path, start, c.dtype.size)

        return grouped_strips((t.name, strip(t)) for t in plan.transfers)

    def write_containers(self, root: Path, names: set[str], files: OpenFiles) -> None:
        """Write everything but the tensors' bytes of the named files, below `root`."""
        for name in names & self.files.keys():
            path, position = root / name, 0
            for piece, skipped in self._around(name):
                files.write(path, position, piece)
                position += len(piece) + skipped

    def _around(self, name: str) -> Iterator[tuple[bytes, int]]:
        """Yield the bytes of a file around its tensors: pieces, each with the length of the tensor
        after it."""
        piece = NO_STATE if self.files[name][0].offset else b""
        position = len(piece)
        for c in self.files[name]:
            yield piece + bytes(c.offset - position) + c.container.head, c.container.data_bytes
            piece, position = c.container.tail, c.end
        yield piece, 0

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's entry for each file: its size, and the checksum of everything but
        the tensors' bytes."""
        return {
            name: file_entry(size, (piece for piece, _ in self._around(name)), around_tensors=True)
            for name, size in self.sizes().items()
        }

    def metadata(self) -> bytes:
        """Return the iteration's ``.metadata``."""
        self.objects = list(self.objects)
        keys: dict[str, torch_dist.Key] = {}
        first: dict[int, str] = {}
        for name, placed in self.files.items():
            file = Path(name).name
            first.setdefault(placed[0].chunk.rank, file)
            for c in placed:
                key = keys.setdefault(c.chunk.key, torch_dist.Key(c.dtype, c.chunk.key_shape))
                key.chunks[c.chunk.offsets, c.chunk.sizes] = torch_dist.Stored(
                    file, c.offset, c.container.size_bytes
                )
        states = {key: torch_dist.Stored(first[rank], 0, len(NO_STATE)) for key, rank in self.objects}
        return torch_dist.metadata_bytes(keys, states, self.directory)


@lru_cache(1 << 12)
def _container(dtype: Dtype, sizes: tuple[int, ...]) -> torch_zip.Container:
    return torch_zip.tensor_container(dtype, sizes)
