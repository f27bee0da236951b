"""What commands print: progress on a terminal, results as text or JSON."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from reshard.cli.options import together
from reshard.core.errors import shown
from reshard.core.limits import MAX_WORKERS
from reshard.core.printed import size

BAR_COLUMNS = 24

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
workers_option = click.option(
    "--workers", type=click.IntRange(1, MAX_WORKERS), help="Processes (default: one for each core)."
)


def _ignore(context: click.Context, _: click.Parameter, names: tuple[str, ...]) -> None:
    from reshard.models.config_fields import ignored_config_fields

    context.with_resource(ignored_config_fields(*names))


ignore_option = click.option(
    "--ignore-config-field",
    multiple=True,
    metavar="NAME",
    callback=_ignore,
    expose_value=False,
    help="Read a config as if it lacked this field. Can be repeated.",
)
# Of every command that converts.
run_options = together(
    click.option("--overwrite", is_flag=True, help="Replace the destination, once the new one is complete."),
    click.option("--resume", is_flag=True, help="Continue an interrupted run."),
    click.option(
        "--no-sync",
        "sync",
        flag_value=False,
        default=True,
        help="Do not wait until the bytes are on the disk.",
    ),
    click.option("--dry-run", is_flag=True, help="Print what would be read and written, and write nothing."),
    workers_option,
    ignore_option,
    json_option,
)


@contextlib.contextmanager
def progress_bar(
    title: str, amount: Callable[[int], str] | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with rate and time left on a terminal's stderr; a line each minute if that is a file or a pipe, such as
    a job's log. `amount` says how much is done, by default in bytes."""
    if sys.stderr is None:
        yield None
        return
    if not sys.stderr.isatty():
        if os.environ.get("RANK", "0") != "0":  # the first process says it
            yield None
            return
        yield _Lines(title, amount or size).show
        return
    bar = _Bar(title, amount or size)
    bar.draw(title)
    try:
        yield bar.show
    finally:
        bar.draw("")


class _Progress:
    """Progress that is shown when there is something new, every so many `SECONDS` at most, and by no thread: a
    program with threads does not fork."""

    SECONDS: float

    def __init__(self, title: str, amount: Callable[[int], str]) -> None:
        self.title, self.amount = title, amount
        self.began = self.shown = time.monotonic()
        self.first: int | None = None  # what an earlier run has done, which says nothing of the rate

    def show(self, done: int, total: int) -> None:
        """Show that so much is done, if it is time to."""
        now = time.monotonic()
        if self.first is None:
            self.first = done
        if now - self.shown < self.SECONDS:
            return
        self.shown, seconds = now, max(now - self.began, 1e-9)
        share = done / total if total else 1.0
        rate = (done - self.first) / seconds
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        self.draw_progress(share, f"{share:4.0%} {self.amount(done)} of {self.amount(total)}{left}")

    def draw_progress(self, share: float, text: str) -> None:
        """Show the text of a share that is done."""
        raise NotImplementedError


class _Lines(_Progress):
    """Lines of a log."""

    SECONDS = 60.0

    def draw_progress(self, share: float, text: str) -> None:
        """Write a line. A log that cannot be written does not end the work."""
        with contextlib.suppress(OSError):
            click.echo(f"{self.title}: {text.strip()}", err=True)


class _Bar(_Progress):
    """A line of a terminal that is drawn again and again."""

    SECONDS = 0.1

    def draw_progress(self, share: float, text: str) -> None:
        """Draw the bar."""
        self.draw(f"{self.title} [{'#' * round(share * BAR_COLUMNS):<{BAR_COLUMNS}}] {text}")

    def draw(self, line: str) -> None:
        """Put a line in the place of the last one. A terminal that has gone away does not end the
        work."""
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"\r\033[K{line[: columns - 1]}")
            sys.stderr.flush()


def quiet() -> None:
    """Keep the libraries that run models from talking while they load."""
    import logging
    import warnings

    # Before they are imported: torch's extensions look for CUDA while they are.
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout. Numbers that JSON lacks (NaN, infinity) become strings."""
    click.echo(shown(json.dumps(_plain(value), indent=2, allow_nan=False)))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_note(sentence: str) -> None:
    """Print a sentence on stderr besides the result. A closed stderr is not an error."""
    with contextlib.suppress(OSError):
        click.echo(f"note: {sentence}", err=True)


def print_result(result: Any, lines: Iterable[str] | None = None) -> None:
    """Print a result's notices as notes, and its lines, or these."""
    for notice in result.notices:
        print_note(shown(notice))
    for line in result.lines() if lines is None else lines:
        click.echo(shown(line))


def print_report(report: Any, as_json: bool, seconds: float) -> None:
    """Print the report of a conversion, in the first of its processes."""
    if report.process:
        return
    if as_json:
        print_json(report.to_dict() | {"seconds": round(seconds, 3)})
        return
    print_result(report)
    if not report.dry_run:
        click.echo(f"{seconds:.1f} s, {size(int(report.read_bytes / max(seconds, 1e-9)))}/s")


def write_page(page: Path, text: str) -> None:
    """Write a report, whole or not at all: what was there before stays where that fails. Raises OSError."""
    from reshard.html import UNENCODABLE

    in_place = page.is_symlink() or (page.exists() and not page.is_file())  # such as a terminal
    partial = page if in_place else page.with_name(f".{page.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors=UNENCODABLE)
        if not in_place:
            partial.replace(page)
    finally:
        if not in_place:
            partial.unlink(missing_ok=True)
