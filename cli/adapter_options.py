"""Options of the commands that convert a LoRA adapter."""

from collections.abc import Callable

import click

from reshard.cli.options import DtypeChoice, together
from reshard.cli.output import run_options
from reshard.cli.places import PathOrHubId
from reshard.core.limits import MAX_RANKS

adapter_options = together(
    click.option("--dtype", type=DtypeChoice(["bf16", "fp16", "fp32"]), help="Cast (default: as it is)."),
    run_options,
)


CONFIG_OF_BASE = click.option(
    "--hf-config",
    type=PathOrHubId(),
    help="config.json of the base model, its directory or hub id (default: the one that the adapter names).",
)
ALPHA = click.option("--alpha", type=float, help="The adapter's alpha, if the checkpoint does not say it.")


def saved_tp(flag: str) -> Callable:
    """Return the option, under this flag, of the tensor-parallel size with which an adapter was saved."""
    return click.option(
        flag,
        type=click.IntRange(1, MAX_RANKS),
        help="Tensor-parallel size with which it was saved, if that matters and the checkpoint does not say it.",
    )


SAVED_TP = saved_tp("--saved-tp")  # of commands with another --tp
