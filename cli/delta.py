"""``reshard delta``: its commands save, apply and show."""

import time
from typing import Any

import click

from reshard.cli.output import (
    ignore_option,
    json_option,
    print_json,
    print_report,
    progress_bar,
    run_options,
    size,
    workers_option,
)
from reshard.cli.places import PathOrHubId, resumable

_VERSION = click.IntRange(min=0)
_HF_CONFIG = click.option(
    "--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint with."
)


@click.group("delta")
def command() -> None:
    """Keep versions of a model as a chain of small files: each holds what changed since the one before."""


@command.command("save", short_help="Add what changed from OLD to NEW to CHAIN.")
@click.argument("old", type=PathOrHubId())
@click.argument("new", type=PathOrHubId())
@click.argument("chain", type=PathOrHubId())
@click.option("--version", type=click.IntRange(min=1), help="Version of NEW (default: the next).")
@_HF_CONFIG
@workers_option
@ignore_option
@json_option
def save_command(old: str, new: str, chain: str, as_json: bool, **options: Any) -> None:
    """Add what changed from OLD to NEW, checkpoints of either format, to CHAIN: a directory, or a URL such as
    s3://bucket/run. The first call begins the chain, with OLD as its base."""
    from reshard.delta.disk import save

    start = time.perf_counter()
    with progress_bar("delta save") as progress:
        report = save(old, new, chain, progress=progress, **options)
    if as_json:
        print_json(report.to_dict() | {"seconds": round(time.perf_counter() - start, 3)})
        return
    click.echo(
        f"wrote version {report.version} of {report.chain}: {report.changed:,} of {report.elements:,} elements changed "
        f"({report.density:.2%}), {size(report.delta_bytes)} instead of {size(report.weights_bytes)}"
    )


@command.command("apply")
@click.argument("base", type=PathOrHubId())
@click.argument("chain", type=PathOrHubId())
@click.argument("destination", type=PathOrHubId())
@click.option("--version", type=_VERSION, help="Version to write (default: the newest; 0: the base).")
@_HF_CONFIG
@click.option("--max-shard-size", help="Largest safetensors file, such as 5GB.")
@click.option(
    "--drafter",
    nargs=2,
    type=PathOrHubId(),
    metavar="BASE DST",
    help="Of a chain with a drafter, write that too: from the directory with which it began, to another.",
)
@run_options
def apply_command(base: str, chain: str, destination: str, as_json: bool, **options: Any) -> None:
    """Write a version of CHAIN to DESTINATION, a Hugging Face directory. BASE is the checkpoint, of either
    format, with which the chain was begun."""
    from reshard.delta.disk import apply

    start = time.perf_counter()
    with progress_bar("delta apply") as progress, resumable(destination):
        report = apply(base, chain, destination, progress=progress, **options)
    print_report(report, as_json, time.perf_counter() - start)


@command.command("show")
@click.argument("chain", type=PathOrHubId())
@json_option
def show_command(chain: str, as_json: bool) -> None:
    """Show the versions of CHAIN. Exit status 1 if one is missing or out of order."""
    from reshard.delta.chain import show

    contents = show(chain)
    if as_json:
        print_json(contents)
        return
    named = contents["base"]
    if contents["drafter"] is not None:
        named += f" with drafter {contents['drafter']}"
    click.echo(
        f"base: {named}, {contents['tensors']} tensors, {size(contents['weights_bytes'])}, {_digests(contents)}"
    )
    for delta in contents["deltas"]:
        click.echo(
            f"version {delta['version']}: {delta['changed']:,} elements changed ({delta['density']:.2%}), "
            f"{size(delta['bytes'])}, {_digests(delta)}"
        )


def _digests(shown: dict[str, Any]) -> str:
    """Return the digest of all weights, and that of the model's where a drafter is beside it."""
    all_weights, of_model = f"digest {shown['digest']}", f"of the model {shown['digest_of_model']}"
    return all_weights if shown["digest"] == shown["digest_of_model"] else f"{all_weights}, {of_model}"
