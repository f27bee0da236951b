"""A checkpoint in an object store as a directory on this host: the same names and sizes, without the bytes, which are
read by ranges where they are (`reshard.formats.ranges`).

The directories lie in one that the process removes when it ends. Opened again, a place is listed again.
"""

import atexit
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.core.errors import SHOWN_AS, ReshardError
from reshard.formats.ranges import FILES
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.stores.marks import RECORDS, unfinished_sentence
from reshard.storage.stores.place import StorePlace, is_store
from reshard.storage.stores.ranges import BLOCKS, Listing, StoreFile, version_numbers

_lock = threading.Lock()
ITERATION = re.compile(
    "iter_[0-9]{1,18}"
)  # as `reshard.storage.sources.paths` has it, which opens what is here
_root: list[Path] = []  # one directory of this process, once there is one


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return the directory of a place: a path as it is, a URL as a directory whose files are read in the store.

    Raises ReshardError if nothing is at the URL, or something that is not a whole checkpoint.
    """
    if not is_store(place):
        return Path(place)
    assert isinstance(place, str)
    with _lock:
        return _mirror(StorePlace(place))


def _mirror(place: StorePlace) -> Path:
    """Lay out the files of a place."""
    path = _directory(place)
    inside = Listing(place)
    _lay_out(path, inside)
    # The config and manifest of an iteration may lie in the directory of its run.
    above = (
        StorePlace(place.url.rpartition("/")[0]) if _is_iteration(path.name) and "/" in place.root else None
    )
    if above is not None:
        _lay_out(path.parent, Listing(above), without=path.name)
    return path


def _lay_out(path: Path, listing: Listing, without: str | None = None) -> None:
    """Make the files of a listing, each as a hole of its length; those of directories that are not whole are left out,
    and with `without` those of iterations. Raises ReshardError if there are none."""
    objects = listing.get()
    folders = {name.rpartition(f"{RECORDS}/")[0] for name in objects if f"{RECORDS}/" in f"/{name}"}
    unfinished = {folder for folder in folders if folder + MANIFEST not in objects}
    if "" in unfinished:
        raise ReshardError(unfinished_sentence(listing.place.url))
    names = {
        name: info
        for name, info in objects.items()
        if not name.startswith(tuple(unfinished))
        and RECORDS not in PurePosixPath(name).parts
        and _is_safe(name)
        and not (
            without is not None and (_is_iteration(name.partition("/")[0]) or name.startswith(f"{without}/"))
        )
    }
    if not names and without is None:
        raise ReshardError(f"nothing is at {listing.place.url}: no object's name begins with it")
    for name in [key for key in FILES if key.startswith(f"{path}/") and without is None]:
        if name.removeprefix(f"{path}/") not in names:
            FILES.pop(name, None)
            Path(name).unlink(missing_ok=True)
    for name, info in names.items():
        _lay_out_file(path / name, listing, name, info)


def _lay_out_file(path: Path, listing: Listing, name: str, info: dict[str, Any]) -> None:
    known = FILES.get(str(path))
    if isinstance(known, StoreFile) and known.recorded == version_numbers(info):
        known.listing, known.name = listing, name
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        os.truncate(file.fileno(), int(info["size"]))
        os.fchmod(file.fileno(), 0)  # so that nobody who does not ask the store takes its zeros for weights
    FILES[str(path)] = StoreFile(listing, name, info, BLOCKS)


def _directory(place: StorePlace) -> Path:
    """Return the directory that stands for a place, and have errors name the URL instead."""
    if not _root:
        _root.append(Path(os.path.realpath(tempfile.mkdtemp(prefix="reshard-store-"))))
        atexit.register(_remove, _root[0], os.getpid())
    scheme, _, names = place.url.partition("://")
    top = _root[0] / scheme
    SHOWN_AS[f"{top}/"] = f"{scheme}://"
    return top / names


def _remove(root: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(root, ignore_errors=True)


def _is_iteration(name: str) -> bool:
    return name == "release" or ITERATION.fullmatch(name) is not None


def _is_safe(name: str) -> bool:
    """Return True for a name that is a file's below the place, and not a folder's mark."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") for part in parts) and "\0" not in name
