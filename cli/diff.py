"""``reshard diff``."""

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
    for notice in [] if as_json else result.notices:
        print_note(notice)
    if as_json:
        print_json(result.to_dict())
    elif result.equal:
        click.echo(f"equal: {result.tensors} tensors, bit for bit")
    else:
        for name, (left, right) in result.fields.items():
            click.echo(
                f"the configs make two models of the same weights: {name} is {left} in {a}, {right} in {b}"
            )
        for side, names in ((a, result.only_a), (b, result.only_b)):
            for name in names[:worst]:
                click.echo(f"only in {side}: {name}")
        for d in result.differences[:worst]:
            click.echo(f"{d.name}: {d.sentence}")
        retyped = sum(d.values_equal for d in result.differences)
        which = (
            f", {'all' if retyped == len(result.differences) else retyped} of them in dtype only"
            if retyped
            else ""
        )
        lone = len(result.only_a) + len(result.only_b)
        click.echo(
            f"{len(result.differences)} of {result.tensors} tensors differ{which}, {lone} are on one "
            f"side only"
        )
    if not result.equal:
        raise click.exceptions.Exit(1)
