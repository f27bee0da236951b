"""What lies beside a checkpoint's weights: files and folders that go where the weights go, and those that stay.

Everything there is one or the other, but for hidden entries: those that stay are named.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.core.errors import listed
from reshard.formats.small_files import MAX_COPIED_BYTES
from reshard.formats.torch_dist import TRACKER
from reshard.megatron.flags import FLAGS_FILE
from reshard.quantization.modelopt import CONFIG as MODELOPT_CONFIG
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.sources.paths import HF_FILES, ITERATION, OF_TRAINERS

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
    ".distcp",
    ".ckpt",
    ".pkl",
)
MAX_FILES_OF_FOLDER = 1000
# vLLM would apply the first, a description of how weights are quantized, to the new weights.
STAY = (MODELOPT_CONFIG, *OF_TRAINERS)
# What this package writes itself, and the files that it reads, or names where it does not.
OWN = (MANIFEST, TRACKER, FLAGS_FILE)
OWN_SUFFIXES = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Beside:
    """Files and folders beside weights: `files` go along, by their names in the directory, those in folders
    as ``folder/name``; `left` are the names of those that stay."""

    files: dict[str, Path]
    left: list[str]

    def notices(self) -> list[str]:
        """Return a sentence that names what stays; none if nothing does."""
        return [f"beside the weights, and not carried along: {listed(self.left, 3)}"] if self.left else []


def beside(directory: Path | None) -> Beside:
    """Find what lies beside the weights in a Hugging Face directory, or in the ``hf/`` of a Megatron checkpoint.

    Config, tokenizer, templates, code and the like go along, in folders too. Weights in other formats stay, and
    folders with such, files larger than any tokenizer, and a trainer's own files.
    """
    files: dict[str, Path] = {}
    left: list[str] = []
    for path in [] if directory is None else sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name in OWN or path.name.endswith(OWN_SUFFIXES):
            continue
        if path.is_dir():
            if not _is_checkpoint(path):
                inside = _files_of_folder(path)
                files |= inside or {}
                left += [f"{path.name}/"] if inside is None else []
        elif path.is_file():
            size = path.stat().st_size
            if size > MAX_COPIED_BYTES:
                left.append(f"{path.name} ({size:,} bytes)")
            elif path.name in STAY or path.name.endswith(WEIGHT_SUFFIXES):
                left.append(path.name)
            else:
                files[path.name] = path
    return Beside(files, left)


def unread_beside(directory: Path, read: Collection[Path]) -> list[str]:
    """Return the names of what lies in the directory of a Megatron checkpoint and is not among the files that are
    read: hidden entries, other iterations, and what this package writes there itself apart."""
    known = {path.relative_to(directory).parts[0] for path in read if path.is_relative_to(directory)}
    names = []
    for path in sorted(directory.iterdir()):
        if (
            path.name.startswith(".")
            or path.name in (*OWN, HF_FILES, *known)
            or path.name.endswith(".distcp")
        ):
            continue
        if not path.is_dir():
            names.append(path.name)
        elif not _is_checkpoint(path):
            names.append(f"{path.name}/")
    return names


def code_without_file(config: Mapping[str, Any], files: Collection[str]) -> list[str]:
    """Return the files of code that a config names, and that do not lie beside it."""
    code = config.get("auto_map")
    names = {name for name in code.values() if isinstance(name, str)} if isinstance(code, dict) else set()
    modules = {
        name.rpartition(".")[0] for name in names if "--" not in name
    }  # that is code of another repository
    return sorted(f"{module}.py" for module in modules if module and f"{module}.py" not in files)


def _is_checkpoint(folder: Path) -> bool:
    """Return True for an iteration of a training beside a config, which has weights of its own."""
    return folder.name == "release" or ITERATION.fullmatch(folder.name) is not None


def _files_of_folder(folder: Path) -> dict[str, Path] | None:
    """Return the files of a folder and of those in it, by name; None if it holds weights, or more than goes along."""
    files: dict[str, Path] = {}
    size = 0
    for path in _walk(folder):
        size += path.stat().st_size
        if (
            path.name.endswith(WEIGHT_SUFFIXES)
            or size > MAX_COPIED_BYTES
            or len(files) >= MAX_FILES_OF_FOLDER
        ):
            return None
        files[path.relative_to(folder.parent).as_posix()] = path
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below it, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path
