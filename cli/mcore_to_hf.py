"""``reshard mcore-to-hf``."""

import time
from collections.abc import Callable
from typing import Any

import click

from reshard.cli.dtypes import DtypeChoice
from reshard.cli.output import ignore_option, json_option, print_report, progress_bar, workers_option
from reshard.cli.places import PathOrHubId, check_command, resumable

_HF_CONFIG = click.option(
    "--hf-config",
    type=PathOrHubId(),
    help="config.json, or a directory with it and the tokenizer (default: the one beside the weights, else "
    "from the checkpoint's args).",
)
_WITHOUT_ADAPTERS = click.option(
    "--without-adapters", is_flag=True, help="Leave out a LoRA adapter that lies beside the weights."
)
_FAMILY = click.option("--family", help="Family, where the args alone leave it open.")


def source_options(function: Callable) -> Callable:
    """Add the options of a command that converts a Megatron checkpoint."""
    return _HF_CONFIG(_FAMILY(_WITHOUT_ADAPTERS(function)))


@click.command("mcore-to-hf")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@source_options
@click.option("--dtype", type=DtypeChoice(["bf16", "fp16", "fp32"]), help="Cast (default: as it is).")
@click.option(
    "--quantize",
    metavar="SCHEME",
    help="Write linear weights as fp8 (128x128 blocks), or in the format of compressed-tensors as fp8_per_channel, "
    "int4_per_group (of 128 columns), int4_per_group_32 or nvfp4.",
)
@click.option(
    "--max-shard-size",
    help="Largest safetensors file, such as 5GB; by default at most 5 GB, and 16 files or more of at least 1 GB.",
)
@click.option(
    "--allow-overflow",
    is_flag=True,
    help="Let a cast make infinities of numbers that are too large, and count them.",
)
@click.option("--overwrite", is_flag=True, help="Replace the destination, once the new one is complete.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run.")
@click.option(
    "--no-sync", "sync", flag_value=False, default=True, help="Do not wait until the bytes are on the disk."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be read and written.")
@workers_option
@ignore_option
@json_option
def command(source: str, destination: str, as_json: bool, quantize: str | None, **options: Any) -> None:
    """Convert SOURCE, a Megatron torch_dist checkpoint of any layout, to a Hugging Face directory at
    DESTINATION."""
    check_command(source, destination, megatron=True)
    from reshard.storage.convert import mcore_to_hf

    start = time.perf_counter()
    with progress_bar("mcore-to-hf") as progress, resumable(destination):
        report = mcore_to_hf(source, destination, quantize=quantize or False, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)
