"""Directories: made, removed and synced."""

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.core.system import sync_file

# How many files are removed at a time.
REMOVERS = 8


def remove_tree(tree: str | Path) -> None:
    """Remove a directory and all in it, several files at a time: a system frees the memory or the
    blocks of a large one for as long as it takes."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(tree) for name in names]
    with contextlib.suppress(OSError, RuntimeError), ThreadPoolExecutor(REMOVERS) as pool:
        list(pool.map(os.unlink, files))  # rmtree raises for what is left
    shutil.rmtree(tree)


def nearest_directory(path: Path) -> Path:
    """Return the innermost part of a path that exists, without the path itself; it may be a file."""
    return next(parent for parent in path.parents if os.path.lexists(parent))


def make_parents(path: Path) -> list[Path]:
    """Make the directories above a path that are missing, and return them, innermost first. Raises OSError."""
    missing = [parent for parent in path.parents if not parent.is_dir()]
    path.parent.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(directories: list[Path]) -> None:
    """Remove directories that are empty, in this order; the others stay."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def inode_of(path: Path) -> int | None:
    """Return the inode of a path, not following links; None if there is none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def sync_directory(path: str | Path) -> None:
    """Bring a directory's entries to the disk, where the file system takes that."""
    # not every file system takes it, and a directory may be writable but not readable
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_file(descriptor)
        finally:
            os.close(descriptor)


def current_directory() -> str | None:
    """Return the current directory of this process; None once it is removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
