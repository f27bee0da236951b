"""How a command ends that does not end well: one sentence on stderr, with --json an object on
stdout too, and an exit status."""

import contextlib
import errno
import os
import shlex
import signal
import sys
import traceback

import click

from reshard.cli.output import print_json
from reshard.core.errors import OptionError, ReshardError, first_line
from reshard.core.extras import lacking
from reshard.core.version import __version__

DEBUG = "RESHARD_DEBUG"


def status_of(error: BaseException, interrupted: int = 0) -> int:
    """Say what ended the command, unless nobody can read it; the exit status. `interrupted` says
    which signal has come, as by Ctrl-C, whatever a library made of that."""
    if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):
        # click takes an EOFError for an end of the user's input; here it is one of a file
        error = error.__cause__
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return error.code or 0
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(error)
    if interrupted or isinstance(error, (click.Abort, KeyboardInterrupt)):
        interrupt = error.__cause__ if isinstance(error, click.Abort) else error
        hint = str(interrupt) if isinstance(interrupt, KeyboardInterrupt) else ""
        return _end(
            f"Interrupted{f': {hint}' if hint else ''}.", "interrupted", 128 + (interrupted or signal.SIGINT)
        )
    if isinstance(error, click.ClickException):
        with contextlib.suppress(OSError, ValueError):
            error.show()
        return _end(None, error.format_message(), error.exit_code)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return 1  # who was to read it has gone
    sentence = _sentence(error)
    return _end(f"Error: {sentence}", sentence, 2 if isinstance(error, OptionError) else 1)


def _sentence(error: BaseException) -> str:
    if isinstance(error, (ReshardError, SystemExit)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (hint := lacking(error)) is not None:
        return str(hint)
    if isinstance(error, MemoryError):
        return "out of memory; use fewer --workers"
    if isinstance(error, OSError) and error.strerror:
        if isinstance(error, FileNotFoundError) and not error.filename and _is_nowhere():
            return "the current directory was removed or replaced: cd to one that is there"
        return f"the system refused{f' {error.filename}' if error.filename else ''}: {error.strerror}"
    return _unexpected(error)


def _is_nowhere() -> bool:
    from reshard.storage.io.directories import current_directory

    return current_directory() is None


def _unexpected(error: BaseException) -> str:
    import tempfile

    what = f"unexpected {type(error).__name__}: {first_line(error)}"
    try:
        descriptor, path = tempfile.mkstemp(prefix="reshard-error-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(
                f"{shlex.join(sys.argv)}\n{_versions()}\n\n{''.join(traceback.format_exception(error))}"
            )
    except OSError:
        return f"{what}. Please report it, with the traceback that {DEBUG}=1 shows"
    return f"{what}. Please report it, with the traceback in {path} ({DEBUG}=1 shows it)"


def _versions() -> str:
    import platform
    from importlib import metadata

    versions = [f"Python {platform.python_version()}", f"reshard {__version__}"]
    for package in ("megatron-core", "torch", "transformers", "vllm", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def _end(line: str | None, message: str, status: int) -> int:
    """Print `line` to stderr, and the message as JSON where that was asked for, in the first
    process of a run of several; return the status."""
    with contextlib.suppress(OSError, ValueError):
        if line is not None:
            click.echo(line, err=True)
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if "--json" in options and (
        os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"
    ):
        with contextlib.suppress(OSError, ValueError):
            print_json({"error": message, "exit_code": status})
    return status
