"""The manifest: `reshard.json` in everything that is written here.

It says where the weights came from, how they are laid out and by which versions, and has a checksum (XXH3, 128 bits) of every
canonical tensor's bytes in the dtype that is stored. It has no dates or host names: the same conversion writes the same bytes.
"""

import json
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError
from reshard.streams import TensorInfo

NAME = "reshard.json"
CHECKSUM = "xxh3_128"


def versions() -> dict[str, str]:
    """Versions of what decides the bytes."""
    from importlib import metadata

    found = {}
    for package in ("reshard", "megatron-core", "torch", "transformers", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def manifest_json(fields: dict[str, Any], tensors: dict[str, TensorInfo], checksums: dict[str, str]) -> str:
    """The text of a manifest; one line a tensor, sorted."""
    listing = ",\n".join(
        f"    {json.dumps(name)}: " + json.dumps({"dtype": t.dtype.name, "shape": list(t.shape), CHECKSUM: checksums[name]})
        for name, t in sorted(tensors.items())
    )
    head = json.dumps({**fields, "versions": versions(), "checksum": CHECKSUM}, indent=2)
    return head[:-2] + ',\n  "tensors": {\n' + listing + "\n  }\n}\n"


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a directory, or None. Raises ReshardError where it is not readable."""
    path = directory / NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        assert isinstance(found["tensors"], dict) and isinstance(found["family"], str)
    except (ValueError, KeyError, TypeError, AssertionError, OSError) as error:
        raise ReshardError(f"{path} is not a readable manifest ({error!r:.80})") from error
    return found
