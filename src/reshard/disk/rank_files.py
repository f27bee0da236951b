"""The ``.distcp`` files of a layout's ranks: where every chunk's container starts, known before a byte is
written."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.core.planner import Plan, Transfer
from reshard.disk.files import OpenFiles
from reshard.disk.manifest import file_entry
from reshard.disk.streams import Strip, TensorInfo, grouped_strips, strip_of
from reshard.formats import torch_dist, torch_zip
from reshard.megatron.checkpoint import Chunk, NewObject

# Every file starts with one empty ``_extra_state``, which all objects of its rank refer to.
NO_STATE = torch_zip.object_bytes([None])


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk in its file: the container around its bytes, and the byte at which that starts."""

    chunk: Chunk
    dtype: Dtype
    container: torch_zip.Container
    offset: int

    @property
    def end(self) -> int:
        """The byte after the container."""
        return self.offset + self.container.size_bytes


class RankFiles:
    """The files of one iteration, by rank; names are relative to the checkpoint, `directory` is the
    iteration's.

    Raises ReshardError where the chunks of a key would have different dtypes: `.metadata` has one for each
    key.
    """

    def __init__(
        self,
        directory: str,
        chunks: Iterable[Chunk],
        objects: Iterable[NewObject],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.directory = directory
        self.chunks: dict[int, list[PlacedChunk]] = defaultdict(list)
        self.objects = objects
        dtypes: dict[str, tuple[Dtype, str]] = {}
        containers: dict[tuple, torch_zip.Container] = {}
        for chunk in sorted(chunks, key=lambda c: c.rank):
            for part in chunk.tensor.parts:
                dtype, first = dtypes.setdefault(chunk.key, (tensors[part.name].dtype, part.name))
                other = tensors[part.name].dtype
                if other != dtype:
                    raise ReshardError(
                        f"{first} is {dtype.name} and {part.name} is {other.name}, but Megatron's "
                        f"{chunk.key} has one dtype: pass --dtype"
                    )
            dtype = dtypes[chunk.key][0]
            container = containers.get((dtype, chunk.sizes)) or torch_zip.tensor_container(dtype, chunk.sizes)
            containers[dtype, chunk.sizes] = container
            group = self.chunks[chunk.rank]
            end = group[-1].end if group else len(NO_STATE)
            group.append(PlacedChunk(chunk, dtype, container, end + -end % torch_zip.ALIGNMENT))

    def name(self, rank: int) -> str:
        """The file of a rank."""
        return f"{self.directory}/__{rank}_0.distcp"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, in the order of ranks."""
        return {self.name(rank): group[-1].end for rank, group in self.chunks.items()}

    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of tensors in each rank's file, without the containers."""
        return {str(rank): sum(c.container.data_bytes for c in group) for rank, group in self.chunks.items()}

    def strips(self, plan: Plan) -> dict[str, list[Strip]]:
        """Where the rows of each canonical tensor go, by a plan whose destination is these chunks."""
        paths = {rank: Path(self.name(rank)) for rank in self.chunks}
        places = {c.chunk.tensor.id: (paths[rank], c) for rank, group in self.chunks.items() for c in group}

        def strip(t: Transfer) -> Strip:
            path, c = places[t.dst]
            shape, start = c.chunk.tensor.shape, c.offset + len(c.container.head)
            return strip_of(t.box.offsets, t.box.lengths, t.dst_at, shape, path, start, c.dtype.size)

        return grouped_strips((t.name, strip(t)) for t in plan.transfers)

    def write_containers(self, root: Path, names: set[str], files: OpenFiles) -> None:
        """Write everything but the tensors' bytes of the named files, below `root`."""
        for rank, group in self.chunks.items():
            path = root / self.name(rank)
            if self.name(rank) in names:
                between, position = NO_STATE, len(NO_STATE)
                for c in group:
                    start = position - len(between)
                    files.write(path, start, between + bytes(c.offset - position) + c.container.head)
                    between, position = c.container.tail, c.end
                files.write(path, position - len(between), between)

    def entries(self) -> dict[str, dict[str, Any]]:
        """What a manifest says of each file: its size, and the checksum of everything but the tensors'
        bytes."""

        def around(group: list[PlacedChunk]) -> Iterator[bytes]:
            yield NO_STATE
            position = len(NO_STATE)
            for c in group:
                yield bytes(c.offset - position) + c.container.head
                yield c.container.tail
                position = c.end

        return {
            self.name(rank): file_entry(group[-1].end, around(group), around_tensors=True)
            for rank, group in self.chunks.items()
        }

    def metadata(self) -> bytes:
        """The iteration's ``.metadata``."""
        keys: dict[str, torch_dist.Key] = {}
        for rank, group in self.chunks.items():
            file = Path(self.name(rank)).name
            for c in group:
                key = keys.setdefault(c.chunk.key, torch_dist.Key(c.dtype, c.chunk.key_shape))
                key.chunks[c.chunk.offsets, c.chunk.sizes] = torch_dist.Stored(
                    file, c.offset, c.container.size_bytes
                )
        states = {
            key: torch_dist.Stored(Path(self.name(rank)).name, 0, len(NO_STATE)) for key, rank in self.objects
        }
        return torch_dist.metadata_bytes(keys, states, self.directory)
