"""Hugging Face hub ids as sources."""

import os
import re
from pathlib import Path

from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import importing
from reshard.storage.run.partial import unfinished
from reshard.storage.stores.mirror import local_path
from reshard.storage.stores.place import is_store

# What a conversion needs of a repository.
BESIDE_WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
PATTERNS = ["*.safetensors", *BESIDE_WEIGHTS]


def local_directory(source: str, patterns: list[str] = PATTERNS) -> Path:
    """Return the directory of a source: a path as it is, a hub id (``Qwen/Qwen3-0.6B``, optionally
    ``@revision``) once `patterns` of it are downloaded.

    Raises ReshardError if it is neither or the hub does not have it, and for the URL of an object store: who reads
    these calls `source_directory`.
    """
    if is_store(source):
        raise ReshardError(
            f"{source} is in an object store, and this reads directories: copy it to one, and give that"
        )
    if not source.strip():
        raise ReshardError("the path is empty; say . for the current directory")
    path = Path(source)
    _check_reachable(path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise ReshardError(f"{source} is a file, not a directory: give {Path(source).parent}")
    left = unfinished(path)
    if left is not None:
        raise ReshardError(left)
    name, revision = check_hub_id(source)
    with importing():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ReshardError(
            f"{source} is not a directory here, and the hub has no such model or revision (or it is private)"
        ) from error
    except HFValidationError as error:
        raise ReshardError(f"{source} is neither a directory nor a hub id: {first_line(error)}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ReshardError(
            f"{source} is not a directory here, and the hub could not be reached ({first_line(error).rstrip('.')}): "
            f"where it can, run: hf download {name} --local-dir DIRECTORY, and give DIRECTORY here"
        ) from error


def source_directory(source: str) -> Path:
    """Return the directory of a source whose files are all read by reshard: as `local_directory` does, and of a URL one
    whose files are read in their store (`local_path`). Raises ReshardError as these do."""
    return local_path(source) if is_store(source) else local_directory(source)


def _check_reachable(path: str | Path) -> None:
    """Raise ReshardError if a directory on the way to a path may not be looked into: it would be taken for a path
    that is not there."""
    try:
        os.stat(path)
    except PermissionError as error:
        raise ReshardError(f"cannot look into {Path(path).parent}: {error.strerror}") from error
    except (OSError, ValueError):
        return


def config_path(config: str | Path) -> Path:
    """Return the path of a ``config.json``, or of a directory with one. Of a hub id all but the weights is
    fetched. Raises ReshardError if it is none of these."""
    if is_store(config):
        folder, _, name = str(config).rpartition("/")
        return local_path(folder) / name if name.endswith(".json") else local_path(config)
    _check_reachable(config)
    if os.path.exists(config):
        return Path(config)
    if str(config).endswith(".json"):
        raise ReshardError(f"{config} does not exist: give a config.json, a directory with one, or a hub id")
    return local_directory(str(config), BESIDE_WEIGHTS)


def check_hub_id(source: str) -> tuple[str, str | None]:
    """Return the name and the revision of a hub id. Raises ReshardError for what cannot be one."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", source, re.ASCII)
    if match is None or source.startswith((".", "/")):
        page = re.match(r"(?:https?://(?:huggingface\.co|hf\.co)/|hf://)([\w.-]+/[\w.-]+)", source, re.ASCII)
        example = f": give {page[1]}" if page else " such as Qwen/Qwen3-0.6B"
        raise ReshardError(f"{source[:300]!s} is neither a directory nor a hub id{example}")
    return match[1], match[2]
