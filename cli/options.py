"""What the options of commands are made of: choices of dtypes, options that several commands have, and headings in
the help of one with more of them than a screen."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class DtypeChoice(click.Choice):
    """A choice of dtypes by their short names; torch's names are understood too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(LONG_NAMES.get(value, value), param, ctx)


def together(*options: Callable) -> Callable:
    """Return a decorator that adds these options to a command, in this order."""

    def add(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def grouped(groups: Mapping[str, Sequence[str]]) -> type[click.Command]:
    """Return a class of commands whose help lists options under these headings (heading to names of
    parameters). Options that no group names come last."""

    class GroupedCommand(click.Command):
        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            headings = {name: heading for heading, names in groups.items() for name in names}
            records: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*groups, "Output")}
            for parameter in self.get_params(ctx):
                record = parameter.get_help_record(ctx)
                if record is not None:
                    records[headings.get(parameter.name or "", "Output")].append(record)
            for heading, lines in records.items():
                if lines:
                    with formatter.section(heading):
                        formatter.write_dl(lines)

    return GroupedCommand
