"""Make the parser of Megatron's command line once, before ranks are forked: a sixth of what a rank with a
small model does."""

from argparse import ArgumentParser

from megatron.training import arguments
from megatron.training.argument_utils import ArgumentGroupFactory

read = ArgumentGroupFactory._get_field_docstrings
add = arguments.add_megatron_arguments
docstrings: dict[type, dict[str, str]] = {}


def docstrings_of(factory: ArgumentGroupFactory, kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, for the help, which Megatron reads from its sources."""
    if kind not in docstrings:
        docstrings[kind] = read(factory, kind)
    return docstrings[kind]


def first_made(parser: ArgumentParser) -> ArgumentParser:
    """Return the parser that is there already in place of one that has nothing but a description; once, since
    whoever gets it may change it."""
    return made.pop() if made and len(parser._actions) == 1 else add(parser)


ArgumentGroupFactory._get_field_docstrings = docstrings_of
made = [add(ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False))]
arguments.add_megatron_arguments = first_made
