"""``reshard hf-to-mcore``."""

import time
from typing import Any

import click

from reshard.cli.layout import layout_options, pop_layout
from reshard.cli.options import DtypeChoice, together
from reshard.cli.output import print_report, progress_bar, run_options
from reshard.cli.places import PathOrHubId, check_command, resumable
from reshard.core.limits import MAX_ITERATION, MAX_VOCAB_MULTIPLE

# Of the commands that write a Megatron checkpoint.
megatron_options = together(
    layout_options,
    click.option(
        "--make-vocab-size-divisible-by",
        type=click.IntRange(1, MAX_VOCAB_MULTIPLE),
        default=128,
        show_default=True,
        help="Pad the vocabulary to a multiple of this times TP.",
    ),
    click.option(
        "--dtype",
        type=DtypeChoice(["bf16", "fp16", "fp32"]),
        help="Cast the weights (default: keep their dtype; quantized weights become what the config "
        "says, usually bf16).",
    ),
    click.option(
        "--transformer-impl",
        type=click.Choice(["transformer_engine", "local"]),
        default="transformer_engine",
        show_default=True,
        help="The layers that will load it. They name some norms differently.",
    ),
    click.option(
        "--model-class",
        type=click.Choice(["gpt", "hybrid"]),
        help="The class that will load it: GPTModel, or HybridModel, which replaces it (default: "
        "GPTModel, but HybridModel for models with Mamba layers).",
    ),
    click.option(
        "--megatron-version",
        metavar="0.14",
        help="Write the flags for this version of Megatron-LM (default: the newest known).",
    ),
    click.option(
        "--iteration",
        type=click.IntRange(1, MAX_ITERATION),
        help="Write this numbered iteration instead of a release.",
    ),
    click.option(
        "--allow-overflow",
        is_flag=True,
        help="Let a cast overflow to infinity, and count the affected values.",
    ),
    run_options,
)


@click.command("hf-to-mcore")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@click.option(
    "--hf-config",
    type=PathOrHubId(),
    help="config.json, a directory or a hub id with it, for an FSDP checkpoint that has none beside it.",
)
@megatron_options
def command(source: str, destination: str, as_json: bool, **options: Any) -> None:
    """Convert SOURCE, a Hugging Face directory, a hub id, or a checkpoint of an FSDP trainer, to a Megatron checkpoint
    at DESTINATION.

    Megatron-LM loads it with --load DESTINATION and the flags in DESTINATION/megatron_flags.txt, at
    this layout or any other. Under torchrun the processes share the work.
    """
    check_command(source, destination, megatron=False)
    from reshard.megatron.layout import MegatronLayout
    from reshard.storage.convert import hf_to_mcore

    layout = MegatronLayout(**pop_layout(options))
    start = time.perf_counter()
    with progress_bar("hf-to-mcore") as progress, resumable(destination):
        report = hf_to_mcore(source, destination, layout, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)
