"""``reshard lora-to-megatron``."""

import time
from typing import Any

import click

from reshard.cli.adapter_options import ALPHA, CONFIG_OF_BASE, SAVED_TP, adapter_options
from reshard.cli.output import print_report, progress_bar
from reshard.cli.places import PathOrHubId, resumable
from reshard.core.limits import MAX_ITERATION, MAX_RANKS


@click.command("lora-to-megatron")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@click.option(
    "--format",
    type=click.Choice(["bridge", "mcore-bridge"]),
    default="bridge",
    show_default=True,
    help="Whose modules will load it: Megatron-Bridge's (NeMo-RL, SkyRL), or mcore-bridge's (ms-swift).",
)
@click.option(
    "--canonical/--fused",
    default=None,
    help="Megatron-Bridge's CanonicalLoRA, or its LoRA (default: LoRA if q, k and v share their A, "
    "and gate and up too).",
)
@click.option(
    "--tp",
    type=click.IntRange(1, MAX_RANKS),
    help="Tensor-parallel size at which mcore-bridge or CanonicalLoRA will load it (default: 1).",
)
@click.option(
    "--iteration", type=click.IntRange(0, MAX_ITERATION), default=0, help="Number of the iteration to write."
)
@ALPHA
@SAVED_TP
@CONFIG_OF_BASE
@adapter_options
def command(source: str, destination: str, as_json: bool, **options: Any) -> None:
    """Convert SOURCE, a PEFT directory or the checkpoint of another trainer with a LoRA adapter, to a
    Megatron checkpoint of the adapter at DESTINATION, which loads at any layout."""
    from reshard.storage.lora.convert import lora_to_megatron

    start = time.perf_counter()
    with progress_bar("lora-to-megatron") as progress, resumable(destination):
        report = lora_to_megatron(source, destination, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)
