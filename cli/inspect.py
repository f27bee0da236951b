"""``reshard inspect``."""

import click

from reshard.cli.output import ignore_option, json_option, print_json, print_note, size
from reshard.cli.places import Place


@click.command("inspect")
@click.argument("path", type=Place())
@click.option("--hf-config", type=Place(), help="config.json to read a Megatron checkpoint with.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@ignore_option
@json_option
def command(path: str, hf_config: str | None, tensors: bool, as_json: bool) -> None:
    """Show format, family, layout, sizes and manifest of the checkpoint at PATH."""
    from reshard.storage.inspection import inspect

    found = inspect(path, hf_config=hf_config)
    if as_json:
        print_json(found.to_dict())
        return
    for notice in found.notices:
        print_note(notice)
    dtypes = ", ".join(f"{name} ({n:,})" for name, n in sorted(found.dtypes.items()))
    rows = [
        ("format", found.format), ("family", f"{found.family} ({found.architecture})"),
        ("layers", f"{found.layers}" + (f" + {found.mtp_layers} MTP" if found.mtp_layers else "")),
        ("experts", found.experts or None), ("parameters", f"{found.parameters:,}"), ("size", size(found.size_bytes)), ("dtypes", dtypes),
        ("layout", " ".join(f"{key}={value}" for key, value in (found.layout or {}).items() if value is not False) or None),
        *found.details.items(),
        ("manifest", found.manifest and f"{found.manifest['tensors']} tensors, from "
                                        f"{found.manifest['source']}"),
    ]  # fmt: skip
    for key, value in rows:
        if value is not None:
            click.echo(f"{key:<12}{value}")
    if tensors:
        for name, entry in found.tensors.items():
            click.echo(f"  {name}  {entry['dtype']}  {entry['shape']}")
