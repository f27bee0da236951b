"""What a source of weights is: anything that holds a model's, read as canonical tensors."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.formats.small_files import read_json
from reshard.formats.torch_dist import TRACKER
from reshard.megatron.parameters import ModelParameters
from reshard.models.config_fields import ignored_config_fields
from reshard.models.model import Model
from reshard.storage.io.boxes import BoxReader
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.manifest import read_manifest
from reshard.storage.sources.beside import Beside, beside, code_without_file
from reshard.storage.sources.versions import FileVersions

# Files that are enough for a tokenizer, besides sentencepiece's and tiktoken's, which are named by
# their ends.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
BESIDE_TOKENIZERS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


class Source(ABC):
    """A model's weights as canonical tensors.

    `tensors` are shapes and dtypes by published name (quantized ones already as what they
    dequantize to), `strips` says where each lies, and `compute` makes those that lie nowhere. `copies`
    are the names in it that repeat another tensor, `mapping` the expanded table, `notices` what a user should be
    told, `versions` its files as they were before anything of them was read.
    """

    kind: str
    is_model = True  # and not something that is added to one
    path: Path
    model: Model
    mapping: ModelParameters
    tensors: dict[str, TensorInfo]
    copies: dict[str, str]
    uncast: frozenset[str] = frozenset()  # tensors that keep their dtype where others are cast
    experts_packed = True  # as files of the family may have them; False where these, or those before, do not
    notices: list[str]
    assumed: Sequence[str] = ()  # those of them that say on what its tensors rest
    files: OpenFiles
    versions: FileVersions

    @abstractmethod
    def strips(self, name: str) -> list[Strip] | None:
        """Return the strips of a canonical tensor; None for one that `compute` makes."""

    def compute(self, name: str, start: int, stop: int) -> np.ndarray:
        """Make rows `start` .. `stop` of a canonical tensor without strips, ``[rows, columns]``; valid until the
        thread's next call."""
        raise NotImplementedError

    @property
    def held(self) -> Mapping[str, TensorInfo]:
        """The `tensors` as the files hold them: some less 1."""
        return self.tensors

    @cached_property
    def reader(self) -> BoxReader:
        """The reader of rows and boxes of the tensors, as the files hold them."""
        return BoxReader(self.held, self.files, self.strips, self.compute)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows `start` .. `stop` of a canonical tensor as it is published, ``[rows, columns]``; valid until the
        thread's next call."""
        return self.reader.published(name, start, stop)

    def row_multiple(self, name: str) -> int:
        """Return how many rows are best read together."""
        return 1

    def matrix_bytes(self) -> int:
        """Return the bytes of the largest matrix that is read as a whole for some rows of a tensor."""
        return 0

    @abstractmethod
    def hf_directory(self) -> Path | None:
        """Return the directory with config, tokenizer and generation config."""

    def hf_files(self) -> dict[str, Path]:
        """Return the files beside the weights of a Hugging Face checkpoint, by name: config,
        tokenizer, generation config, chat template."""
        return self._beside()

    @abstractmethod
    def read_files(self) -> list[Path]:
        """Return every file that a conversion of this source reads, or would if it were there:
        weights, indexes, configs, manifest."""

    def pinned_files(self) -> list[Path]:
        """Return the files that have to stay as they are while the source is read: not the tracker,
        by which a training run says that it has gone on to another iteration."""
        return [path for path in sorted(set(self.read_files())) if path.name != TRACKER]

    def identity(self) -> tuple[list[Any], list[Any]]:
        """Return what a resumed run must find unchanged: of every file that is read its size and
        times, with what the model was read as; and which files these are, by inode and by where
        their links end, as this host knows it."""
        top, times, places = os.path.realpath(self.path), [], []
        for path in self.pinned_files():
            name, version = os.path.relpath(path, self.path), self.versions[path]
            if version is not None:
                times.append([name, version.size_bytes, version.mtime_ns, version.ctime_ns])
                places.append([name, version.inode, os.path.relpath(os.path.realpath(path), top)])
        return [times, self.model.family.name, self.model.config], places

    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        """Return the tensors as a manifest lists them: codes and scales, and adapters of all experts, as they are
        stored."""
        return self.tensors

    def read_stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of a tensor of `stored_tensors`."""
        return self.read_rows(name, start, stop)

    @abstractmethod
    def spans(self, file: str) -> list[tuple[int, int]]:
        """Return the first byte and the end of every tensor in a file, by its name in the manifest, in order."""

    def factors(self) -> Mapping[str, float]:
        """Return the numbers by which the tensors are multiplied where they are used, by what each is of."""
        return {}

    def leaves_out(self, name: str) -> bool:
        """Return True for a tensor that the manifest lists and this source is not asked for."""
        return False

    def dequantized_names(self) -> list[str]:
        """Return the names of the weights that are stored as codes and read as the numbers that
        these stand for."""
        return []

    def unchanged(self) -> AbstractContextManager[None]:
        """Raise ReshardError at the end of the `with` block, naming them, where files were changed
        since the source was opened."""
        return self.versions.unchanged(self.pinned_files)

    def _beside(self) -> dict[str, Path]:
        """Return the files that go along with the weights, by name."""
        return beside(self.hf_directory()).files

    def _take_beside(self, config: Mapping[str, Any]) -> None:
        """Record the versions of the files that go along with the weights, and note which stay, and which code the
        config names that is not there."""
        lying_beside, directory = beside(self.hf_directory()), self.hf_directory()
        self.versions.record(*lying_beside.files.values())
        read = {path.parent for path in self.read_files()} if lying_beside.left else set()
        left = [name for name in lying_beside.left if directory is None or directory / name not in read]
        self.notices += Beside(lying_beside.files, [*left, *self.left_beside()]).notices()
        lacking = [] if directory is None else code_without_file(config, lying_beside.files)
        if lacking:
            self.notices.append(f"config.json names code that does not lie beside it: {listed(lacking, 3)}")

    def left_beside(self) -> list[str]:
        """Return the names of what lies beside the weights themselves, and stays there."""
        return []

    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest, where there is one."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return the details that `inspect` shows of this format only."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return True if a tokenizer is among these files."""
    return any(name in TOKENIZERS or name.endswith((".tiktoken", ".model")) for name in names)


def of_tokenizer(name: str) -> bool:
    """Return True for a file of a tokenizer, or of a chat template."""
    return has_tokenizer([name]) or name in BESIDE_TOKENIZERS or name.startswith("additional_chat_templates/")


def read_config(path: Path) -> dict[str, Any]:
    """Read a Hugging Face ``config.json``. Raises ReshardError if it is missing or not a JSON
    object, naming a directory below it that has one."""
    folder = path.parent
    if folder.is_dir() and not os.path.lexists(path):
        below = [each.parent for way in ("*", "snapshots/*") for each in folder.glob(f"{way}/{path.name}")]
        newest = max(
            below, key=lambda each: (len(each.name), each.name), default=None
        )  # checkpoint-100 after -99
        hint = f"give {newest}, which has one" if newest else "give a directory that has one, or a hub id"
        raise ReshardError(f"{folder} has no {path.name}, so it is not a Hugging Face directory: {hint}")
    return read_json(path)


@contextlib.contextmanager
def ignored_as_recorded(directory: Path | None) -> Iterator[None]:
    """Ignore, inside the `with` block, the config fields that were ignored when this directory was
    written: its weights belong to the model without them."""
    manifest = None if directory is None else read_manifest(directory)
    with ignored_config_fields(*(manifest or {}).get("ignored_config_fields", ()), recorded=True):
        yield
