"""The chunks in the ``.distcp`` files of a checkpoint: where the bytes of each lie."""

from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.formats import torch_dist, torch_zip
from reshard.storage.io.files import OpenFiles

# Containers with checksums in them are all different: a few are remembered, not thousands to look through.
MOST_REMEMBERED = 16


class Containers:
    """The containers of a checkpoint's chunks, read through `files`."""

    def __init__(self, checkpoint: torch_dist.Checkpoint, files: OpenFiles) -> None:
        self.checkpoint, self.files = checkpoint, files
        self.paths: dict[str, Path] = {}
        self.known_frames: dict[int, list[tuple[bytes, bytes, torch_zip.ContainedTensor]]] = defaultdict(list)

    def path(self, stored: torch_dist.Stored) -> Path:
        """Return the file that a container lies in."""
        return self.paths.setdefault(stored.file, self.checkpoint.directory / stored.file)

    def chunk_at(
        self, stored: torch_dist.Stored, key: str, dtype: Dtype, sizes: tuple[int, ...]
    ) -> torch_zip.ContainedTensor:
        """Return a chunk of a key; its offset counts from the start of the file. Raises ReshardError if it has
        another dtype or another shape than ``.metadata`` says."""
        tensor = self.tensor_at(stored)
        if tensor.dtype != dtype or [n for n in tensor.shape if n != 1] != [n for n in sizes if n != 1]:
            raise ReshardError(
                f"{self.path(stored)} at byte {stored.offset} holds {tensor.dtype.name} {list(tensor.shape)}, "
                f".metadata says {dtype.name} {list(sizes)}: {key}"
            )
        return tensor

    def tensor_at(self, stored: torch_dist.Stored) -> torch_zip.ContainedTensor:
        """Return a container's tensor; its offset counts from the start of the file. A container
        whose bytes around the data were seen before is not parsed again."""
        path = self.path(stored)
        head = self.files.read(path, stored.offset, min(1024, stored.length))
        for known, tail, tensor in self.known_frames[stored.length]:
            if (
                head.startswith(known)
                and self.files.read(path, stored.offset + stored.length - len(tail), len(tail)) == tail
            ):
                return replace(tensor, offset=stored.offset + tensor.offset)
        tensor = self.checkpoint.tensor_at(stored)
        relative = replace(tensor, offset=tensor.offset - stored.offset)
        end = relative.offset + prod(tensor.shape) * tensor.dtype.size
        if (
            relative.offset <= len(head)
            and stored.length - end <= 4096
            and len(self.known_frames[stored.length]) < MOST_REMEMBERED
        ):
            tail = self.files.read(path, stored.offset + end, stored.length - end)
            self.known_frames[stored.length].append((head[: relative.offset], tail, relative))
        return tensor


class PlainChunks(Containers):
    """Chunks that are plain bytes of files, with nothing around them."""

    def chunk_at(
        self, stored: torch_dist.Stored, key: str, dtype: Dtype, sizes: tuple[int, ...]
    ) -> torch_zip.ContainedTensor:
        return torch_zip.ContainedTensor(dtype, sizes, stored.offset)
