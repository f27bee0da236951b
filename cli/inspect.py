"""``reshard inspect``."""

import click

from reshard.cli.output import ignore_option, json_option, print_json, print_result, progress_bar
from reshard.cli.places import PathOrHubId


@click.command("inspect")
@click.argument("path", type=PathOrHubId())
@click.option("--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint with.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--digest", is_flag=True, help="Read the weights, and show their digest.")
@ignore_option
@json_option
def command(path: str, hf_config: str | None, tensors: bool, digest: bool, as_json: bool) -> None:
    """Show format, family, layout, sizes and manifest of the checkpoint at PATH."""
    from reshard.storage.inspection import inspect

    inspection = inspect(path, hf_config=hf_config)
    if digest:
        from reshard.storage.digest import digest_of_path

        with progress_bar("digest") as progress:
            inspection.digest = digest_of_path(path, hf_config=hf_config, progress=progress).text
    if as_json:
        print_json(inspection.to_dict())
        return
    print_result(inspection)
    if tensors:
        for name, entry in inspection.tensors.items():
            click.echo(f"  {name}  {entry['dtype']}  {entry['shape']}")
