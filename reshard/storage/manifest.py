"""The manifest: `reshard.json` in everything that is written here.

It says where the weights came from, how they are laid out and by which versions, and has a checksum
(XXH3, 128 bits) of every canonical tensor's bytes in the dtype that is stored, and of every file:
of a file with weights, the bytes around the tensors'. It has no dates or host names: the same
conversion writes the same bytes.

The digest of the weights (`reshard.digest`) is not in it: XXH3 takes a core 0.1 s for a GB, and the digest 1.3 s, half
as long as the whole conversion, and it says nothing of files. ``reshard check --digest`` computes it of what it has
found intact.
"""

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from reshard.core.errors import ReshardError
from reshard.core.version import __version__
from reshard.formats.small_files import MAX_INDEX_BYTES, read_json, whole_numbers
from reshard.storage.io.streams import TensorInfo

NAME = "reshard.json"
CHECKSUM = "xxh3_128"


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the bytes."""
    from importlib import metadata

    installed = {"reshard": __version__}
    for package in ("megatron-core", "torch", "transformers", "safetensors"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def file_entry(
    size_bytes: int, parts: Iterable[bytes | memoryview], around_tensors: bool = False
) -> dict[str, Any]:
    """Return the manifest's entry for a file of these parts; with `around_tensors` the parts leave
    out the tensors' bytes."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return {"bytes": size_bytes, CHECKSUM: digest.hexdigest()} | (
        {"around_tensors": True} if around_tensors else {}
    )


def printable(source: object) -> str:
    """Return a path or hub id as a manifest can hold it: bytes of a file name that are no UTF-8
    become question marks."""
    return os.fsencode(str(source)).decode("utf-8", "replace")


def manifest_json(fields: dict[str, Any], tensors: dict[str, TensorInfo], checksums: dict[str, str],
                  files: dict[str, dict[str, Any]]) -> str:  # fmt: skip
    """Return the text of a manifest: one line a file and a tensor, sorted. `files` are entries made
    by `file_entry`."""
    small = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(files.items())
    )
    listing = ",\n".join(
        f"    {json.dumps(name)}: "
        f"" + json.dumps({"dtype": t.dtype.name, "shape": list(t.shape), CHECKSUM: checksums[name]})
        for name, t in sorted(tensors.items())
    )
    head = json.dumps({**fields, "versions": versions(), "checksum": CHECKSUM}, indent=2)
    return head[:-2] + ',\n  "files": {\n' + small + '\n  },\n  "tensors": {\n' + listing + "\n  }\n}\n"


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a directory, or None.

    Raises ReshardError if it is not readable or not of the form that `manifest_json` gives;
    manifests of before files were listed have no ``files``.
    """
    path = directory / NAME
    if not path.exists():
        return None
    status = path.stat()
    return _read(path, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(4)  # it is long, and asked for in several places
def _read(path: Path, version: tuple[int, ...]) -> dict[str, Any]:
    manifest = read_json(path, "a readable manifest", MAX_INDEX_BYTES)
    problem = _problem(manifest)
    if problem:
        raise ReshardError(f"{path} is not a readable manifest: {problem}")
    return manifest


def _problem(manifest: dict[str, Any]) -> str:
    """Return what is wrong with the form of a manifest; empty if it is right."""
    kinds: dict[str, type] = {
        "tensors": dict,
        "family": str,
        "source": str,
        "layout": dict,
        "quantized": list,
        "files": dict,
        "ignored_config_fields": list,
        "experts_packed": bool,
    }
    for field, kind in kinds.items():
        if not isinstance(
            manifest.get(field, None if field in ("tensors", "family", "source") else kind()), kind
        ):
            return f"its {field} is missing or of the wrong type"
    for name, entry in manifest["tensors"].items():
        sound = isinstance(entry, dict) and all(
            isinstance(entry.get(field), str) for field in ("dtype", CHECKSUM)
        )
        if not sound or not whole_numbers(entry.get("shape")):
            return f"its entry for {name[:200]!a} lacks a dtype, shape or checksum"
    for name, entry in manifest.get("files", {}).items():
        if (
            not isinstance(entry, dict)
            or not whole_numbers([entry.get("bytes")])
            or not isinstance(entry.get(CHECKSUM), str)
        ):
            return f"its entry for {name[:200]!a} lacks bytes or a checksum"
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"it names the file {name[:200]!a}, which is outside of its directory"
    for field, what in (("quantized", "quantized tensors"), ("ignored_config_fields", "ignored fields")):
        if not all(isinstance(name, str) for name in manifest.get(field, [])):
            return f"its list of {what} holds something else than names"
    return ""
