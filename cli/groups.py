"""Options that belong together: of several commands, and under headings in the help of one with more
of them than a screen."""

from collections.abc import Callable, Mapping, Sequence

import click


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
