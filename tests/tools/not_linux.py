"""Another system than Linux, as far as a process can make itself believe: macOS by its name, without Linux's files,
system calls and functions of Python.

    python -c "from tests.tools.not_linux import hide; hide(); ..."
"""

import ctypes
import errno
import os
import sys
import urllib.request  # noqa: F401  before, since on a Mac it imports a module that only a Mac's Python has

# That Python has on Linux and not on macOS, as far as a library might use them.
MISSING = (
    "copy_file_range", "eventfd", "fdatasync", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate",
    "sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare",
)  # fmt: skip
SYSTEM_CALLS = ("renameat2", "prctl", "memfd_create")
LINUX_FILES = ("/proc/", "/sys/")
MOST_BYTES = (1 << 31) - 1  # that macOS reads or writes at once


def hide() -> None:
    """Be macOS from now on. What a thing that is hidden would say is what macOS says."""
    sys.platform = "darwin"
    for name in MISSING:
        if hasattr(os, name):
            delattr(os, name)
    find = ctypes.CDLL.__getattr__

    def found(library: ctypes.CDLL, name: str):
        if name in SYSTEM_CALLS:
            raise AttributeError(f"no function {name}")
        return find(library, name)

    ctypes.CDLL.__getattr__ = found  # type: ignore[method-assign]
    sys.addaudithook(_without_files)
    os.preadv, os.pwritev = (_limited(call) for call in (os.preadv, os.pwritev))


def _without_files(event: str, arguments: tuple) -> None:
    if event == "open" and str(arguments[0]).startswith(LINUX_FILES):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _limited(call):
    def limited(descriptor: int, buffers, offset: int, *flags: int) -> int:
        if sum(map(len, buffers)) > MOST_BYTES:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, buffers, offset, *flags)

    return limited
