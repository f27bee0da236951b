"""``reshard mcore-to-hf``."""

import time
from typing import Any

import click

from reshard.cli.options import DtypeChoice, together
from reshard.cli.output import print_report, progress_bar, run_options
from reshard.cli.places import PathOrHubId, check_command, resumable

# Of every command that converts a Megatron checkpoint.
source_options = together(
    click.option(
        "--hf-config",
        type=PathOrHubId(),
        help=(
            "config.json, a directory with it and the tokenizer, or a hub id (default: the one beside the "
            "weights, else from the checkpoint's args)."
        ),
    ),
    click.option("--family", help="The model's family, if the args do not determine it."),
    click.option(
        "--without-adapters", is_flag=True, help="Leave out a LoRA adapter that is stored with the weights."
    ),
)


# Of every command that writes a Hugging Face directory.
hugging_face_options = together(
    click.option("--dtype", type=DtypeChoice(["bf16", "fp16", "fp32"]), help="Cast (default: as it is)."),
    click.option(
        "--quantize",
        metavar="SCHEME",
        help="Write linear weights as fp8 (128x128 blocks), or in the format of compressed-tensors as fp8_per_channel, "
        "int4_per_group (of 128 columns), int4_per_group_32 or nvfp4.",
    ),
    click.option(
        "--max-shard-size",
        help="Largest safetensors file, such as 5GB; by default at most 5 GB, and 16 files or more of at least 1 GB.",
    ),
    click.option(
        "--allow-overflow",
        is_flag=True,
        help="Let a cast overflow to infinity, and count the affected values.",
    ),
    run_options,
)


@click.command("mcore-to-hf")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@source_options
@hugging_face_options
def command(source: str, destination: str, as_json: bool, quantize: str | None, **options: Any) -> None:
    """Convert SOURCE, a Megatron torch_dist checkpoint of any layout, to a Hugging Face directory at
    DESTINATION."""
    check_command(source, destination, megatron=True)
    from reshard.storage.convert import mcore_to_hf

    start = time.perf_counter()
    with progress_bar("mcore-to-hf") as progress, resumable(destination):
        report = mcore_to_hf(
            source,
            destination,
            quantize=False if quantize is None else quantize,
            progress=progress,
            **options,
        )
    print_report(report, as_json, time.perf_counter() - start)
