"""``reshard demo``."""

import contextlib
import tempfile
import time
from pathlib import Path

import click

from reshard.cli.output import json_option, print_json
from reshard.cli.places import PathOrHubId


@click.command("demo")
@click.option("--keep", type=PathOrHubId(file_okay=False), help="Keep the checkpoints in this new directory.")
@json_option
def command(keep: str | None, as_json: bool) -> None:
    """Convert a small Qwen3-MoE to Megatron (TP2 PP2 EP2) and back, and prove each step. Takes half a minute,
    no GPU."""
    from reshard.core.errors import ReshardError
    from reshard.demo import run_demo

    with contextlib.ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reshard-demo-")))
        else:
            folder = Path(keep)
            if folder.exists():
                raise ReshardError(f"{folder} exists; name a new directory")
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise ReshardError(f"cannot make {folder}: {error.strerror}") from error
        start, good, steps = time.perf_counter(), True, []
        for step in run_demo(folder):
            good = good and step.ok
            seconds = time.perf_counter() - start
            steps.append(
                {"title": step.title, "outcome": step.outcome, "ok": step.ok, "seconds": round(seconds, 3)}
            )
            if not as_json:
                click.echo(f"{'ok  ' if step.ok else 'FAIL'} {seconds:5.1f} s  {step.title}: {step.outcome}")
    if as_json:
        print_json({"ok": good, "steps": steps})
    else:
        click.echo("all steps agree, bit for bit" if good else "some steps do not agree")
    if not good:
        raise click.exceptions.Exit(1)
