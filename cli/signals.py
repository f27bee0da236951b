"""Ctrl-C, SIGTERM and the standard streams, as they are from the first line to the last. Imports nothing
that takes time."""

import codecs
import os
import signal
import sys
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C's, and the one by which slurm and Kubernetes end a process
_seen: list[int] = []


def leave_when_interrupted() -> None:
    """Have Ctrl-C, or SIGTERM, end the process, with a line and status 130, or 143: while modules are imported, and
    once a command has ended, there is nothing to clean up."""
    _handle(_leave)


def raise_when_interrupted() -> None:
    """Have Ctrl-C, or SIGTERM, raise KeyboardInterrupt once, while a command runs; a second one ends the
    process as it is."""
    _handle(_raise)
    sys.unraisablehook = _unraisable


def interrupted() -> int:
    """Return the signal that has interrupted the command, 0 if none has: a library in whose import that happens may
    raise something else."""
    return _seen[0] if _seen else 0


def _handle(handler: Any) -> None:
    # A process in the background, which the shell starts with Ctrl-C ignored, goes on ignoring it.
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL, _leave, _raise):
            signal.signal(number, handler)


def _leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    try:
        os.write(2, b"Interrupted.\n")
    finally:
        os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise KeyboardInterrupt


def _unraisable(unraisable: Any) -> None:
    """End the process for an interrupt in a finalizer, where Python can only report an exception:
    it would be lost."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def prepare_streams() -> None:
    """Occupy the descriptors of closed standard streams, so that no library's message ends in a
    file of ours; and print any name, also one that the terminal's encoding lacks: as the bytes
    that it came from, else escaped."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
    codecs.register_error("reshard", _encodable)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="reshard")


def _encodable(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def flush() -> OSError | None:
    """Bring what was printed out; the error where that fails. What is left is then dropped, or
    Python would complain at its end."""
    failed = None
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            failed = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return failed
