"""A checkpoint that a trainer under FSDP has saved with ``torch.distributed.checkpoint``, read as canonical tensors.

It is a directory of ``.metadata`` and ``.distcp`` files, as Megatron's is, with the names and tensors of a transformers
model in memory: all experts of a layer may be in one, of which published tensors are views. Config and tokenizer lie
beside it, or elsewhere. The files that verl's ranks write one by one (`reshard.formats.torch_shards`) are read alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.boxes import Box, first_overlap
from reshard.core.errors import ReshardError
from reshard.formats import safetensors, torch_dist, torch_shards
from reshard.formats.small_files import MAX_METADATA_BYTES, read_file, read_json
from reshard.megatron.checkpoint import EMBEDDING
from reshard.models.model import Model
from reshard.storage.io.boxes import BoxReader
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.sources.base import BESIDE_TOKENIZERS, TOKENIZERS
from reshard.storage.sources.beside import unread_beside
from reshard.storage.sources.chunks import Chunk, ChunkedTensor
from reshard.storage.sources.containers import Containers, PlainChunks
from reshard.storage.sources.fsdp_keys import weights_among
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.paths import STEP, Located, config_beside, locate
from reshard.storage.sources.versions import FileVersions

# Of parameters that only Megatron's models have, as bytes of a ``.metadata``.
_MEGATRON = (b".linear_qkv.", b".linear_proj.", b".linear_fc1.", b".linear_fc2.")


# What a model has beside its config, by the names that transformers gives.
MODEL_FILES = (
    "generation_config.json", "tokenizer.model", *TOKENIZERS, *BESIDE_TOKENIZERS, "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sharded(safetensors.Tensor):
    """A tensor in chunks: the `file` is its key, by which these are found."""

    entry: torch_dist.Key


def locate_fsdp(path: Path) -> Located | None:
    """Return the checkpoint of a trainer under FSDP that a directory means; None if it is none, or Megatron's."""
    located = locate(path)
    if located is None:
        return _locate_shards(path)
    if any((located.directory / name).is_file() for name in ("metadata.json", "common.pt")):
        return None
    data = read_file(located.directory / ".metadata", MAX_METADATA_BYTES)
    of_megatron = EMBEDDING.encode() in data or (
        b"embed_tokens" not in data and any(name in data for name in _MEGATRON)
    )
    return None if of_megatron else located


def _locate_shards(path: Path) -> Located | None:
    """Return the directory with the shards that verl's ranks have written, below that of a step or this one."""
    if any(path.glob("*.safetensors")):
        return None
    for folder in (path, path / "actor"):
        if torch_shards.shards_in(folder):
            step = next(
                (p.name for p in (folder, *folder.parents[:3]) if STEP.fullmatch(p.name)), folder.name
            )
            return Located(folder, step, folder)
    return None


def names_a_model(path: Path) -> bool:
    """Return True for a config of transformers: a trainer may have one of its own of this name."""
    if not path.is_file():
        return False
    fields = read_json(path)
    return "architectures" in fields or "model_type" in fields


def saver_of(located: Located, prefix: str) -> str:
    """Return who saved a checkpoint, as far as its names say."""
    if torch_shards.shards_in(located.directory):
        return "the ranks of a trainer under FSDP2, as verl does"
    if located.directory.name.startswith("pytorch_model_fsdp_"):
        return "Accelerate"
    return f"torch.distributed.checkpoint, as {prefix}*" if prefix else "torch.distributed.checkpoint"


class FsdpSource(HuggingFaceSource):
    """The weights in a checkpoint of ``torch.distributed.checkpoint`` that has a transformers model's names; `read`
    makes the model of a config, as for `HuggingFaceSource`."""

    kind = "fsdp"

    def __init__(
        self,
        path: Path,
        located: Located,
        hf_config: Path | None,
        read: Callable[[dict[str, Any], str], Model],
    ) -> None:
        self.path, self.located, self.hf_config = path, located, hf_config
        self.notices, self.directory = list(located.notices), located.directory
        self._check_alone()
        self.versions = FileVersions(self.directory, located.root)
        self.config_file = config = self._config()
        self.versions.record(config, config.parent, *self._own_files())
        of_ranks = bool(torch_shards.shards_in(self.directory))
        self.checkpoint = (torch_shards if of_ranks else torch_dist).read(self.directory, located.iteration)
        self._read_model(config, read)
        weights = weights_among(self.checkpoint.keys, self.checkpoint.objects, self.model, self.directory)
        self.prefix, keys = weights.prefix, self.checkpoint.keys
        stored: dict[str, safetensors.Tensor] = {
            name: Sharded(key, keys[key].dtype, keys[key].shape, 0, keys[key])
            for name, key in weights.keys.items()
        }
        names = self._repeated_names()
        self.aliases = {name: stored.pop(name) for name in [*stored] if name in names}
        self.stored = stored if self._has_no_table else self._as_published(stored)
        others = [
            f"{count:,} {'entries' if count > 1 else 'entry'} of {root}"
            for root, count in sorted(weights.left.items())
        ]
        self.notices += [f"left behind: {', '.join(others)}"] if others else []
        self._hold(None)
        for tensor in [*stored.values(), *self.aliases.values()]:
            self._check_covered(tensor.file)
        self.containers = (PlainChunks if of_ranks else Containers)(self.checkpoint, self.files)
        self.chunked = cache(self._chunked)
        # A tied output layer is saved under two names in memory, and published under one.
        self.repeated = {n: p for n, p in self.copies.items() if n in self.mapping.optional}
        self.held_repeated = {name: self.tensors.pop(name) for name in self.repeated}
        self.copies = {n: p for n, p in self.copies.items() if n not in self.repeated}
        self.held_repeated |= {n: TensorInfo(t.shape, t.dtype) for n, t in self.aliases.items()}
        self.repeated |= {name: self._canonical(names[name]) for name in self.aliases}

    def _check_alone(self) -> None:
        """Raise ReshardError where it is not certain that these weights are meant, or whether they are whole."""
        if any(self.directory.glob("*.safetensors")):
            raise ReshardError(
                f"{self.directory} has weights of torch.distributed.checkpoint and in .safetensors files: give those "
                "that you mean a directory of their own"
            )
        if (self.directory / ".metadata.tmp").exists():
            raise ReshardError(
                f"{self.directory} has a .metadata.tmp: a save was not finished, or is not yet; name another step, or "
                "remove that file if the save has ended well"
            )

    def _repeated_names(self) -> dict[str, str]:
        """Return names in memory of parameters of a model without a table that have another name before."""
        if not self._has_no_table:
            return {}
        from reshard.models.saved_tensors import repeated_names

        return repeated_names(self.model.family.architecture, self.model.config, self.model.where)

    def _canonical(self, parameter: str) -> str:
        """Return the published tensor that a parameter of a model without a table is."""
        saved = self.model.family.saved  # type: ignore[attr-defined]
        return next(name for name, tensor in saved.items() if tensor.parameter == parameter)

    @property
    def _has_no_table(self) -> bool:
        return not self.model.family.has_megatron_names

    def _config(self) -> Path:
        """Return the config of the model. Raises ReshardError if there is none."""
        if self.hf_config is not None:
            return self.hf_config / "config.json" if self.hf_config.is_dir() else self.hf_config
        for folder in (self.directory, self.path):
            for name in ("", "hf", "huggingface", ".hf_metadata"):
                if names_a_model(folder / name / "config.json"):
                    self.notices.append(f"config taken from {folder / name / 'config.json'}")
                    return folder / name / "config.json"
        beside = config_beside(self.located)
        if beside is None or beside.directory is None:
            raise ReshardError(
                f"{self.directory} is a checkpoint that a trainer under FSDP has saved with "
                "torch.distributed.checkpoint, and no config.json lies beside it: pass --hf-config with the model that "
                "the training began with"
            )
        self.notices += [beside.notice] if beside.notice else []
        return Path(beside.where)

    def _check_covered(self, name: str) -> None:
        """Raise ReshardError unless each element of a tensor is in one chunk."""
        entry = self.checkpoint.keys[name]
        boxes = [Box(*chunk) for chunk in entry.chunks if prod(chunk[1])]
        held, whole = sum(box.volume for box in boxes), prod(entry.shape)
        if held != whole or first_overlap(boxes) is not None:
            problem = "lacks shards" if held < whole else "has shards that overlap"
            raise ReshardError(
                f"{self.directory}: {name} {problem}: they hold {held:,} elements, its shape {list(entry.shape)} has "
                f"{whole:,}"
            )

    def _places(self) -> dict[str, str]:
        if not self._has_no_table:
            return super()._places()
        from reshard.models.saved_tensors import places_of

        return places_of(self.model.family.saved)  # type: ignore[attr-defined]

    def _chunked(self, name: str) -> ChunkedTensor:
        """Return a stored tensor with the places of its chunks."""
        stored = self.aliases.get(name) or self.stored[name]
        assert isinstance(stored, Sharded)
        chunks = []
        for (offsets, sizes), at in stored.entry.chunks.items():
            if prod(sizes):
                tensor = self.containers.chunk_at(at, stored.file, stored.dtype, sizes)
                chunks.append(Chunk(offsets, sizes, self.containers.path(at), tensor.offset))
        return ChunkedTensor(stored.file, stored.shape, chunks, stored.dtype.size)

    def strips(self, name: str) -> list[Strip]:
        return self.chunked(self._tensor_of(name)).strips(self.packed.get(name, name))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        with super().unchanged():
            yield
            self._check_repeated()

    def _check_repeated(self) -> None:
        """Raise ReshardError if a tensor that was saved under two names is two."""
        for name, primary in self.repeated.items():
            info = self.held_repeated[name]
            strips = self.chunked(name).strips if name in self.aliases else self.strips
            reader = BoxReader({name: info}, self.files, strips)
            same = info == self.tensors[primary]
            for start, stop in info.slabs() if same else ():
                held = reader.rows(name, start, stop).tobytes()
                same = same and held == self.reader.rows(primary, start, stop).tobytes()
            if not same:
                raise ReshardError(
                    f"{self.directory}: {name} differs from {primary}, with which {self.config_file} ties it: if they "
                    'are two, say "tie_word_embeddings": false there'
                )
        self.repeated = {}

    def stored_tensors(self) -> dict[str, TensorInfo]:
        return self.tensors

    def read_stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.read_rows(name, start, stop)

    def spans(self, file: str) -> list[tuple[int, int]]:
        stored = [
            at for key in self.checkpoint.keys.values() for at in key.chunks.values() if at.file == file
        ]
        tensors = map(self.containers.tensor_at, stored)
        return sorted((t.offset, t.offset + prod(t.shape) * t.dtype.size) for t in tensors)

    def hf_directory(self) -> Path | None:
        """Return the directory of the config, whose other files go along; None of a file that was given, and of the
        directory above the one that was named, in which anything may lie: of that go a model's own files."""
        given, folder = self.hf_config, self.config_file.parent
        if given is not None:
            return folder if given.is_dir() else None
        is_above = folder != self.path and self.path.is_relative_to(folder)
        return None if is_above else folder

    def hf_files(self) -> dict[str, Path]:
        own = {path.name: path for path in self._own_files()}
        return own | super().hf_files() | {"config.json": self.config_file}

    def _own_files(self) -> list[Path]:
        """Return the model's own files beside a config that was found, wherever that is."""
        beside = [self.config_file.parent / name for name in MODEL_FILES] if self.hf_config is None else []
        return [path for path in beside if path.is_file()]

    def read_files(self) -> list[Path]:
        chunks = [
            at
            for tensor in self.stored.values()
            for at in tensor.entry.chunks.values()  # type: ignore[attr-defined]
        ]
        own = {".metadata"} if (self.directory / ".metadata").is_file() else set()
        files = {at.file for at in chunks} | own
        return [
            *(self.directory / name for name in sorted(files)), *self.hf_files().values()
        ]  # fmt: skip

    def left_beside(self) -> list[str]:
        if self.directory == self.hf_directory():
            return []  # the files beside the config are these
        return unread_beside(self.directory, self.read_files())

    def manifest(self) -> dict[str, Any] | None:
        return None

    def describe(self) -> dict[str, Any]:
        files = {at.file for key in self.checkpoint.keys.values() for at in key.chunks.values()}
        return {
            "saved_by": saver_of(self.located, self.prefix),
            "files": len(files),
            "keys": len(self.checkpoint.keys),
            "config": str(self.config_file),
        }
