"""What systems do differently, each in one place: Linux's way, macOS's, and what any POSIX system has.

A name is looked up when it is called, so that a way that a system lacks is never missed at import.
"""

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE, RENAME_SWAP = -100, 2, 2  # of Linux's renameat2, and of macOS's renamex_np
PR_SET_PDEATHSIG = 1
F_FULLFSYNC = 51  # of macOS, whose fsync leaves bytes in the disk's own memory
MAC_IO_BYTES = 1 << 30  # macOS refuses to read or write 2 GiB at once, where Linux does a part
# How a file system says that it has no such call.
CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.ENOTTY)
CGROUP = Path("/sys/fs/cgroup")


def is_mac() -> bool:
    """Return True on macOS."""
    return sys.platform == "darwin"


def boot_id() -> str:
    """Return a name of this machine's run since it was started; empty where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    sysctl = getattr(ctypes.CDLL(None), "sysctlbyname", None) if is_mac() else None
    if sysctl is None:
        return ""
    value, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    failed = sysctl(b"kern.bootsessionuuid", value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else value.value.decode()


def sync_file(descriptor: int) -> None:
    """Wait until a file's bytes are on the disk. Raises OSError."""
    if is_mac():
        import fcntl

        try:
            fcntl.fcntl(descriptor, F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in CANNOT:
                raise
    os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Wait until a file's bytes are on the disk, but perhaps not its times. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync_file(descriptor)


def read_vectors(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers from a file, or a part of them; return the bytes that were read. Raises OSError."""
    return os.preadv(descriptor, _at_once(buffers), offset)


def write_vectors(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write buffers into a file, or a part of them; return the bytes that were written. Raises OSError."""
    return os.pwritev(descriptor, _at_once(buffers), offset)


def _at_once(buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return as much of the buffers as the system takes in one call."""
    if not is_mac() or sum(map(len, buffers)) <= MAC_IO_BYTES:
        return buffers
    first = next(buffer for buffer in buffers if len(buffer))
    return [first[:MAC_IO_BYTES]]


def exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two directories in one step; return False if the system or the file
    system cannot. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    one, other = os.fsencode(a), os.fsencode(b)
    if (rename := getattr(library, "renameat2", None)) is not None:
        failed = rename(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE)
    elif is_mac() and (rename := getattr(library, "renamex_np", None)) is not None:
        failed = rename(one, other, RENAME_SWAP)
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(a))


def end_with_parent(parent: int) -> None:
    """Have this process end when its parent does, where the system offers that."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def cores() -> int:
    """Return how many cores this process may use: those it is bound to, or its container's share
    where that is less (``cpu.max`` of cgroups, version 2, or its counterpart in version 1)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):
            quota, period = " ".join((CGROUP / name).read_text(encoding="utf-8") for name in names).split()
            return max(1, min(bound, -(-int(quota) // int(period)))) if int(quota) > 0 else bound
    return bound


def free_memory() -> int | None:
    """Return the bytes of the host's memory that are free; None where the system does not say."""
    with suppress(OSError, StopIteration, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        available = next(line for line in file if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    return None


def namespace(kind: str) -> str:
    """Return the name of one of Linux's namespaces that this process is in; ``KIND:unknown`` elsewhere."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return f"{kind}:unknown"
