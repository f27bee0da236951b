"""``reshard mcore-to-mcore``."""

import time
from typing import Any

import click

from reshard.cli.hf_to_mcore import megatron_options
from reshard.cli.layout import pop_layout
from reshard.cli.mcore_to_hf import source_options
from reshard.cli.output import print_report, progress_bar
from reshard.cli.places import PathOrHubId, check_command, resumable


@click.command("mcore-to-mcore")
@click.argument("source", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@source_options
@click.option(
    "--without-optimizer",
    is_flag=True,
    help="Leave out the optimizer states: write the weights alone, as a release.",
)
@megatron_options
def command(source: str, destination: str, as_json: bool, **options: Any) -> None:
    """Convert SOURCE, a Megatron torch_dist checkpoint, to another one at DESTINATION: for the other
    class of models, other layers or another layout.

    Every bit stays. Optimizer states that can be moved are converted too, so that training can resume.
    """
    check_command(source, destination, megatron=True)
    from reshard.megatron.layout import MegatronLayout
    from reshard.storage.convert import mcore_to_mcore

    layout = MegatronLayout(**pop_layout(options))
    start = time.perf_counter()
    with progress_bar("mcore-to-mcore") as progress, resumable(destination):
        report = mcore_to_mcore(source, destination, layout, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)
