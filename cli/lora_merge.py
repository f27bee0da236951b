"""``reshard lora-merge``."""

import time
from typing import Any

import click

from reshard.cli.adapter_options import ALPHA, SAVED_TP, adapter_options
from reshard.cli.layout import LAYOUT_NAMES, given_options, layout_options, pop_layout
from reshard.cli.output import print_report, progress_bar
from reshard.cli.places import PathOrHubId, resumable


@click.command("lora-merge")
@click.argument("base", type=PathOrHubId())
@click.argument("adapter", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@click.option(
    "--format",
    type=click.Choice(["hf", "mcore"]),
    default="hf",
    show_default=True,
    help="What to write: a Hugging Face directory, or a Megatron checkpoint at the layout below.",
)
@ALPHA
@SAVED_TP
@click.option("--max-shard-size", help="Largest safetensors file, such as 5GB.")
@click.option(
    "--transformer-impl",
    type=click.Choice(["transformer_engine", "local"]),
    default="transformer_engine",
    show_default=True,
    help="Which layers will load a Megatron checkpoint.",
)
@layout_options
@click.option("--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint BASE with.")
@adapter_options
def command(base: str, adapter: str, destination: str, as_json: bool, **options: Any) -> None:
    """Add ADAPTER, a LoRA adapter of PEFT, Megatron-Bridge or mcore-bridge, to the weights of BASE, a model in
    either format, and write the sum to DESTINATION."""
    from reshard.megatron.layout import MegatronLayout
    from reshard.storage.lora.convert import lora_merge

    _check_options_of(options["format"])
    layout = MegatronLayout(**pop_layout(options))
    start = time.perf_counter()
    with progress_bar("lora-merge") as progress, resumable(destination):
        report = lora_merge(base, adapter, destination, layout=layout, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)


def _check_options_of(format: str) -> None:
    """Raise UsageError for an option of the other format, which would have no effect."""
    of_other = ("max_shard_size",) if format == "mcore" else (*LAYOUT_NAMES, "transformer_impl")
    for name, option in given_options().items():
        if name in of_other:
            raise click.UsageError(
                f"{option.opts[0]} has no effect with --format {format}: give --format "
                f"{'hf' if format == 'mcore' else 'mcore'}, or leave it out"
            )
