"""``reshard check``."""

from typing import Any

import click

from reshard.cli.output import (
    ignore_option,
    json_option,
    print_json,
    print_note,
    progress_bar,
    workers_option,
)
from reshard.cli.places import PathOrHubId


@click.command("check")
@click.argument("path", type=PathOrHubId())
@workers_option
@ignore_option
@json_option
def command(path: str, workers: int | None, as_json: bool) -> None:
    """Compare the bytes of the checkpoint at PATH with the checksums in its manifest. Exit status 1
    if they differ."""
    from reshard.storage.check import check

    with progress_bar("check") as progress:
        result = check(path, workers=workers, progress=progress)
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)
    if not result.ok:
        raise click.exceptions.Exit(1)


def _show(result: Any) -> None:
    for notice in result.notices:
        print_note(notice)
    files = f", {result.files} files" if result.files else ""
    if result.ok:
        click.echo(f"intact: {result.tensors} tensors{files}")
        return
    for what, names in (("does not match the manifest", result.bad), ("changed", result.changed), ("missing", result.missing),
                        ("added", result.added)):  # fmt: skip
        for name in names[:20]:
            click.echo(f"{what}: {name}")
        if len(names) > 20:
            click.echo(f"{what}: {len(names) - 20} more (--json has all)")
    click.echo(f"{len(result.bad)} of {result.tensors} tensors do not match")
    if result.changed or result.missing or result.added:
        click.echo(
            f"of {result.files} files {len(result.changed)} changed, {len(result.missing)} are missing, "
            f"{len(result.added)} were added"
        )
