"""``reshard fsdp-to-hf``."""

import time
from typing import Any

import click

from reshard.cli.mcore_to_hf import hugging_face_options
from reshard.cli.output import print_report, progress_bar
from reshard.cli.places import PathOrHubId, resumable


@click.command("fsdp-to-hf")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@click.option(
    "--hf-config",
    type=PathOrHubId(),
    help="config.json, a directory with it and the tokenizer, or a hub id (default: the one beside the weights).",
)
@hugging_face_options
def command(source: str, destination: str, as_json: bool, quantize: str | None, **options: Any) -> None:
    """Convert SOURCE, a checkpoint that a trainer under FSDP has saved with torch.distributed.checkpoint, to a Hugging
    Face directory at DESTINATION.

    SOURCE has .metadata and .distcp files, or verl's model_world_size_N_rank_R.pt, itself or in the folder that the
    trainer has put them in.
    """
    from reshard.storage.convert import fsdp_to_hf

    start = time.perf_counter()
    with progress_bar("fsdp-to-hf") as progress, resumable(destination):
        report = fsdp_to_hf(
            source,
            destination,
            quantize=False if quantize is None else quantize,
            progress=progress,
            **options,
        )
    print_report(report, as_json, time.perf_counter() - start)
