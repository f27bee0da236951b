"""``reshard check``."""

import click

from reshard.cli.output import (
    ignore_option,
    json_option,
    print_json,
    print_result,
    progress_bar,
    workers_option,
)
from reshard.cli.places import PathOrHubId


@click.command("check")
@click.argument("path", type=PathOrHubId())
@click.option("--digest", is_flag=True, help="Show the digest of the weights, too, if all is intact.")
@workers_option
@ignore_option
@json_option
def command(path: str, digest: bool, workers: int | None, as_json: bool) -> None:
    """Compare the bytes of the checkpoint at PATH with the checksums in its manifest. Exit status 1
    if they differ."""
    from reshard.storage.check import check

    with progress_bar("check") as progress:
        result = check(path, digest=digest, workers=workers, progress=progress)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result)
    if not result.ok:
        raise click.exceptions.Exit(1)
