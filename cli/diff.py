"""``reshard diff``."""

from typing import Any

import click

from reshard.cli.options import DtypeChoice
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
@click.option(
    "--digest", is_flag=True, help="Compare digests; A or B may be what reshard digest --json printed."
)
@click.option(
    "--dtype",
    type=DtypeChoice(["bf16", "fp16", "fp32"]),
    help="With --digest, count numbers rounded to this dtype.",
)
@workers_option
@ignore_option
@json_option
def command(
    a: str,
    b: str,
    hf_config: str | None,
    worst: int,
    digest: bool,
    dtype: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Compare checkpoints A and B, of either format and any layout, bit for bit. Exit status 1
    if they differ."""
    if dtype is not None and not digest:
        raise click.UsageError("--dtype is of --digest: give both, or convert one side with --dtype")
    result: Any
    with progress_bar("diff") as progress:
        if digest:
            from reshard.storage.digest import diff_digests

            result = diff_digests(a, b, dtype=dtype, hf_config=hf_config, workers=workers, progress=progress)
        else:
            from reshard.storage.compare import diff

            result = diff(a, b, hf_config=hf_config, workers=workers, progress=progress)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result, result.lines(worst))
    if not result.equal:
        raise click.exceptions.Exit(1)
