"""``reshard digest``."""

import click

from reshard.cli.adapter_options import ALPHA
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


@click.command("digest")
@click.argument("path", type=PathOrHubId())
@click.option(
    "--dtype",
    type=DtypeChoice(["bf16", "fp16", "fp32"]),
    help="Count numbers rounded to this dtype (default: as they are held).",
)
@click.option("--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint with.")
@ALPHA
@click.option(
    "--stored", is_flag=True, help="Count codes and scales of quantized weights as they are stored."
)
@click.option("--tensors", is_flag=True, help="List every tensor with its number.")
@workers_option
@ignore_option
@json_option
def command(
    path: str,
    dtype: str | None,
    hf_config: str | None,
    alpha: float | None,
    stored: bool,
    tensors: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Print the digest of the weights at PATH: the same number for the same weights, whatever their format, layout
    and sharding, in a checkpoint, a live trainer or an engine. PATH may be the address of a running vLLM or SGLang,
    such as http://127.0.0.1:8000."""
    from reshard.comm.http import is_address

    if is_address(path):
        from reshard.digest_of import digest as digest_of

        if stored:
            raise click.UsageError("--stored is of a checkpoint: an engine says what it serves")
        digest = digest_of(path, dtype=dtype, hf_config=hf_config, alpha=alpha, workers=workers)
    else:
        from reshard.storage.digest import digest_of_path

        with progress_bar("digest") as progress:
            digest = digest_of_path(
                path,
                dtype=dtype,
                hf_config=hf_config,
                alpha=alpha,
                stored=stored,
                workers=workers,
                progress=progress,
            )
    if as_json:
        print_json(digest.to_dict())
        return
    print_result(digest)
    if tensors:
        for name, number in digest.tensors.items():
            click.echo(f"  {number}  {name}")
