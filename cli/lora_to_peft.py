"""``reshard lora-to-peft``."""

import time
from collections.abc import Callable
from typing import Any

import click

from reshard.cli.dtypes import DtypeChoice
from reshard.cli.groups import together
from reshard.cli.output import print_report, progress_bar, run_options
from reshard.cli.places import PathOrHubId, resumable
from reshard.core.limits import MAX_RANKS

# Of every command that converts an adapter.
adapter_options = together(
    click.option(
        "--hf-config",
        type=PathOrHubId(),
        help="config.json of the base model, or its directory (default: the one that the adapter names).",
    ),
    click.option("--dtype", type=DtypeChoice(["bf16", "fp16", "fp32"]), help="Cast (default: as it is)."),
    run_options,
)


ALPHA = click.option("--alpha", type=float, help="The adapter's alpha, where the checkpoint does not say it.")


def _saved_tp(flag: str) -> Callable:
    return click.option(
        flag,
        type=click.IntRange(1, MAX_RANKS),
        help="Tensor-parallel size with which it was saved, where that matters and the checkpoint does not say it.",
    )


SAVED_TP = _saved_tp("--saved-tp")  # of commands with another --tp


@click.command("lora-to-peft")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@ALPHA
@_saved_tp("--tp")
@click.option(
    "--experts",
    type=click.Choice(["apart", "together"]),
    default="apart",
    show_default=True,
    help="Adapters of experts one by one, as vLLM takes them, or those of a layer in one tensor, as PEFT has them.",
)
@adapter_options
def command(source: str, destination: str, as_json: bool, **options: Any) -> None:
    """Convert SOURCE, a Megatron checkpoint with a LoRA adapter of Megatron-Bridge or mcore-bridge at any
    layout, to a PEFT directory at DESTINATION."""
    from reshard.storage.lora import lora_to_peft

    start = time.perf_counter()
    with progress_bar("lora-to-peft") as progress, resumable(destination):
        report = lora_to_peft(source, destination, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)
