"""``reshard demo``."""

import contextlib
import tempfile
import time
from pathlib import Path

import click

from reshard.cli.places import Place


@click.command("demo")
@click.option("--keep", type=Place(file_okay=False), help="Leave the checkpoints in this new directory.")
def command(keep: str | None) -> None:
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
            if not folder.absolute().parent.is_dir():
                raise ReshardError(f"{folder.absolute().parent} is not a directory; create it first")
            folder.mkdir()
        start, good = time.perf_counter(), True
        for step in run_demo(folder):
            good = good and step.ok
            click.echo(
                f"{'ok  ' if step.ok else 'FAIL'} {time.perf_counter() - start:5.1f} s  "
                f"{step.title}: {step.outcome}"
            )
    click.echo("all steps agree, bit for bit" if good else "some steps do not agree")
    if not good:
        raise click.exceptions.Exit(1)
