"""``reshard fleet``."""

from typing import Any

import click

from reshard.cli.output import json_option, print_json
from reshard.core.errors import OptionError


@click.command("fleet")
@click.argument("address")
@click.option("--join", "joins", metavar="URL", help="Add the server at this URL, from the next send on.")
@click.option("--leave", "leaves", metavar="NAME", help="Remove this engine, from the next send on.")
@click.option("--name", help="The name of the engine that joins, such as its pod's; by default its URL.")
@click.option("--sglang", is_flag=True, help="The server that joins is an SGLang, not a vLLM.")
@json_option
def command(
    address: str, joins: str | None, leaves: str | None, name: str | None, sglang: bool, as_json: bool
) -> None:
    """Show the engines of the fleet whose registry is at ADDRESS, their versions, and why one is behind.

    A trainer opens it with Fleet(source, ADDRESS, registry=True). Who asks has the same secret in RESHARD_SECRET.
    Example: reshard fleet 10.0.0.1:29600 --join http://10.0.0.7:8000 --name pod-7
    """
    from reshard.comm.registry import ask

    if joins is not None and leaves is not None:
        raise OptionError("--join and --leave are given both: one at a time")
    if joins is None and (name is not None or sglang):
        raise OptionError("--name and --sglang say something of the server of --join, which is not given")
    if joins is not None:
        ask(address, "join", url=joins, name=name, sglang=sglang)
    if leaves is not None:
        ask(address, "leave", name=leaves)
    fleet = ask(address, "describe")
    if as_json:
        print_json(fleet)
        return
    for line in lines(fleet):
        click.echo(line)


def lines(fleet: dict[str, Any]) -> list[str]:
    """Return a line on the fleet, and one on each engine."""
    engines, version = fleet["engines"], fleet["version"]
    current = [name for name, engine in engines.items() if engine["why"] is None]
    said, count = f"version {version}", f"{len(current)} of {len(engines)} engines have it"
    if version is None:
        said = "nothing was sent yet"
        if fleet.get("found") is not None:
            said += f", and engines serve version {fleet['found']} from before"
        else:
            count = "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
    width = max(map(len, engines), default=0)
    return [f"{said}: {count}"] + [f"  {name:{width}}  {_state(engine)}" for name, engine in engines.items()]


def _state(engine: dict[str, Any]) -> str:
    has = "nothing of this trainer" if engine["version"] is None else f"version {engine['version']}"
    age = "" if engine["age"] is None else f", {engine['age']:.0f} s ago"
    return f"{has}{age}" + (f"; behind: {engine['why']}" if engine["why"] else "")
