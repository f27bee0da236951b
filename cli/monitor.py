"""``reshard monitor``."""

from pathlib import Path

import click

from reshard.cli.output import json_option, print_json, print_note, write_page
from reshard.cli.places import PathOrHubId
from reshard.core.errors import ReshardError


@click.command("monitor")
@click.argument("run", type=PathOrHubId())
@click.option(
    "--html",
    type=PathOrHubId(dir_okay=False, writable=True),
    help="Also write a page with charts to this file.",
)
@json_option
def command(run: str, html: str | None, as_json: bool) -> None:
    """Show the steps that a training run's RolloutMonitor has written to RUN, and exit 1 if one is beyond its limits.

    The run may still be going on. Example: reshard monitor run.jsonl --html run.html
    """
    from reshard.parity.rollout.run import read_run

    if html is not None:
        from reshard.core.extras import require

        require("parity", "bokeh", "jinja2")
    steps = read_run(run)
    if html is not None:
        from reshard.parity.rollout.html import html_run

        try:
            write_page(Path(html), html_run(steps))
        except OSError as error:
            raise ReshardError(f"--html: cannot write {html}: {error.strerror}") from error
    if as_json:
        print_json(steps.to_dict())
    else:
        for line in steps.lines():
            click.echo(line)
        for notice in steps.notices:
            print_note(notice)
    if not steps.ok:
        click.echo(f"Error: {steps.verdict}", err=True)
        raise click.exceptions.Exit(1)
