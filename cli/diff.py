"""``reshard diff``."""

import click
from reshard.cli.output import json_option, print_json, progress_bar, workers_option


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--hf-config", type=click.Path(), help="config.json to read a Megatron checkpoint with.")
@click.option("--worst", type=click.IntRange(min=1), default=10, show_default=True, help="How many tensors to show.")
@workers_option
@json_option
def command(a: str, b: str, hf_config: str | None, worst: int, workers: int | None, as_json: bool) -> None:
    """Compare checkpoints A and B, of either format and any layout, bit for bit. Exit status 1 where they differ."""
    from reshard.compare import diff

    with progress_bar("diff") as progress:
        result = diff(a, b, hf_config=hf_config, workers=workers, progress=progress)
    if as_json:
        print_json(result.to_dict())
    elif result.equal:
        click.echo(f"equal: {result.tensors} tensors, bit for bit")
    else:
        for side, names in ((a, result.only_a), (b, result.only_b)):
            for name in names[:worst]:
                click.echo(f"only in {side}: {name}")
        for d in result.differences[:worst]:
            note = f" ({d.note})" if d.note else ""
            click.echo(f"{d.name}: {d.unequal:,} of {d.elements:,} differ, max abs {d.max_abs:.3g}, max rel {d.max_rel:.3g}{note}")
        click.echo(
            f"{len(result.differences)} of {result.tensors} tensors differ, {len(result.only_a) + len(result.only_b)} are on one side only"
        )
    if not result.equal:
        raise click.exceptions.Exit(1)
