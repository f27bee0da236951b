"""``reshard check``."""

import click
from reshard.cli.output import json_option, print_json, progress_bar, workers_option


@click.command("check")
@click.argument("path", type=click.Path())
@workers_option
@json_option
def command(path: str, workers: int | None, as_json: bool) -> None:
    """Compare the bytes of the checkpoint at PATH with the checksums in its manifest. Exit status 1 where they differ."""
    from reshard.compare import check

    with progress_bar("check") as progress:
        result = check(path, workers=workers, progress=progress)
    if as_json:
        print_json(result.to_dict())
    elif result.ok:
        click.echo(f"intact: {result.tensors} tensors")
    else:
        for name in result.bad[:20]:
            click.echo(f"does not match the manifest: {name}")
        click.echo(f"{len(result.bad)} of {result.tensors} tensors do not match")
    if not result.ok:
        raise click.exceptions.Exit(1)
