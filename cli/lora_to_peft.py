"""``reshard lora-to-peft``."""

import time
from typing import Any

import click

from reshard.cli.adapter_options import ALPHA, CONFIG_OF_BASE, adapter_options, saved_tp
from reshard.cli.output import print_report, progress_bar
from reshard.cli.places import PathOrHubId, resumable


@click.command("lora-to-peft")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@ALPHA
@saved_tp("--tp")
@click.option(
    "--experts",
    type=click.Choice(["apart", "together"]),
    default="apart",
    show_default=True,
    help="Adapters of experts one by one, as vLLM takes them, or those of a layer in one tensor, as PEFT has them.",
)
@CONFIG_OF_BASE
@adapter_options
def command(source: str, destination: str, as_json: bool, **options: Any) -> None:
    """Convert SOURCE, a Megatron checkpoint with a LoRA adapter of Megatron-Bridge or mcore-bridge at any
    layout, to a PEFT directory at DESTINATION."""
    from reshard.storage.lora.convert import lora_to_peft

    start = time.perf_counter()
    with progress_bar("lora-to-peft") as progress, resumable(destination):
        report = lora_to_peft(source, destination, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)
