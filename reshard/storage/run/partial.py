"""The hidden directory of a run: its name, whose it is, and what it says of its run.

    .DST.reshard-partial/
      reshard-run      marks the directory as ours; a lock on it keeps a second run away. An empty directory with the
                       sticky bit is one of ours that has no mark yet
      fingerprint      a digest of what the run makes of what, and the inode of its tree
      journal-0 ...    the tensors that each process has finished
      tree/            what becomes DST
      replaced/        the old DST, where the system cannot exchange the two at once

Only a directory with that mark, made by the user who runs this, is ever touched.
"""

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path

MARK, FINGERPRINT, TREE, REPLACED = "reshard-run", "fingerprint", "tree", "replaced"
# The fingerprint of a live model's save, which nobody resumes.
SAVE = "a save of a live model"
MAX_NAME_BYTES, PARTIAL_SUFFIX = 255, ".reshard-partial"
# How the directory is made: a bit that nobody else's empty directories have says that it is ours
# before there is a mark in it. Nobody else writes into it, whatever the umask.
NEW_MODE = 0o1755


def unfinished(path: Path) -> str | None:
    """Return a sentence that names the unfinished run of a destination and says how to continue; None if
    there is no such run."""
    for folder in (partial_directory(Path(os.path.abspath(path))), path, path.parent):
        if not folder.name.endswith(PARTIAL_SUFFIX) or not is_ours(folder) or not read_fingerprint(folder):
            continue
        name = folder.name.removeprefix(".").removesuffix(PARTIAL_SUFFIX)
        destination = folder.with_name(name)
        if partial_directory(destination) != folder:  # the name was too long
            destination = path
        if is_locked(folder):
            return f"a run is writing {destination}, in {folder}: wait for it to end"
        if read_fingerprint(folder).get("run") == SAVE:
            return f"{folder} is left of {destination} by a save that did not end: save again"
        return (
            f"{folder} is left of {destination} by an interrupted run: run the same command with --resume "
            "to continue it, or without to start over"
        )
    return None


def partial_directory(destination: Path) -> Path:
    """Return the hidden directory of a destination."""
    name = f".{destination.name}{PARTIAL_SUFFIX}"
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = f".{hashlib.sha256(os.fsencode(destination.name)).hexdigest()}{PARTIAL_SUFFIX}"
    return destination.parent / name


def read_fingerprint(folder: Path) -> dict:
    """Return what a run says of itself in its hidden directory; nothing if it has not come to
    that."""
    try:
        recorded = json.loads((folder / FINGERPRINT).read_text(encoding="utf-8"))
        return recorded if isinstance(recorded, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def is_locked(folder: Path) -> bool:
    """Return True while a run holds the lock."""
    try:
        with open(folder / MARK, "rb") as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def is_ours(path: Path) -> bool:
    """Return True for a directory of this user's, no link to one, that bears the mark."""
    try:
        status = os.lstat(path)
        marked = stat.S_ISDIR(status.st_mode) and stat.S_ISREG(os.lstat(path / MARK).st_mode)
        return marked and belongs_to_user(path, status)
    except (OSError, ValueError):  # of a name that can be no file's, too
        return False


def belongs_to_user(path: Path, status: os.stat_result) -> bool:
    """Return True if a path belongs to the user who runs this, by the id that its file system
    has for that user: a file server may have another, or one for all."""
    if status.st_uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            return os.fstat(probe.fileno()).st_uid == status.st_uid
    except OSError:
        return False


def is_new(path: Path) -> bool:
    """Return True for a directory as a run makes it that has no mark yet, or no mark any more:
    empty, with the bit that says so."""
    try:
        status = os.lstat(path)
        new = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
        return new and belongs_to_user(path, status) and not os.listdir(path)
    except OSError:
        return False
