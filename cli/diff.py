"""``reshard diff``."""

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


@click.command("diff")
@click.argument("a", type=PathOrHubId())
@click.argument("b", type=PathOrHubId())
@click.option("--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint with.")
@click.option(
    "--worst", type=click.IntRange(min=1), default=10, show_default=True, help="Number of tensors to show."
)
@workers_option
@ignore_option
@json_option
def command(a: str, b: str, hf_config: str | None, worst: int, workers: int | None, as_json: bool) -> None:
    """Compare checkpoints A and B, of either format and any layout, bit for bit. Exit status 1
    if they differ."""
    from reshard.storage.compare import diff

    with progress_bar("diff") as progress:
        result = diff(a, b, hf_config=hf_config, workers=workers, progress=progress)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result, result.lines(worst))
    if not result.equal:
        raise click.exceptions.Exit(1)
