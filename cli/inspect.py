"""``reshard inspect``."""

from typing import Any

import click

from reshard.cli.output import ignore_option, json_option, print_json, print_note, size
from reshard.cli.places import PathOrHubId


@click.command("inspect")
@click.argument("path", type=PathOrHubId())
@click.option("--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint with.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@ignore_option
@json_option
def command(path: str, hf_config: str | None, tensors: bool, as_json: bool) -> None:
    """Show format, family, layout, sizes and manifest of the checkpoint at PATH."""
    from reshard.storage.inspection import inspect

    inspection = inspect(path, hf_config=hf_config)
    if as_json:
        print_json(inspection.to_dict())
        return
    for notice in inspection.notices:
        print_note(notice)
    rows = _rows(inspection)
    width = max(11, *(len(label) for label, _ in rows)) + 1
    for label, value in rows:
        click.echo(f"{label:<{width}}{value}")
    if tensors:
        for name, entry in inspection.tensors.items():
            click.echo(f"  {name}  {entry['dtype']}  {entry['shape']}")


def _rows(inspection: Any) -> list[tuple[str, Any]]:
    """Return the lines to show, as labels and values."""
    dtypes = ", ".join(f"{name} ({count:,})" for name, count in sorted(inspection.dtypes.items()))
    mtp = f" + {inspection.mtp_layers} MTP" if inspection.mtp_layers else ""
    layout = [f"{key}={value}" for key, value in (inspection.layout or {}).items() if value is not False]
    details = dict(inspection.details)
    if quantized := details.get("quantized"):
        formats = f" ({', '.join(quantized['formats'])})" if quantized["formats"] else ""
        details["quantized"] = f"{quantized['weights']:,} weights, {quantized['method']}{formats}"
    manifest = inspection.manifest
    rows = [
        ("format", inspection.format),
        ("family", f"{inspection.family} ({inspection.architecture})"),
        ("layers", f"{inspection.layers}{mtp}"),
        ("experts", inspection.experts or None),
        ("parameters", f"{inspection.parameters:,}"),
        ("size", size(inspection.size_bytes)),
        ("dtypes", dtypes),
        ("layout", " ".join(layout) or None),
        *details.items(),
        ("manifest", manifest and f"{manifest['tensors']} tensors, from {manifest['source']}"),
    ]
    return [(label, value) for label, value in rows if value is not None]
