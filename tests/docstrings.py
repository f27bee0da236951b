"""Read the docstrings of Megatron's sources, for the help of its command line, once, before ranks
are forked."""

from argparse import ArgumentParser

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

read = ArgumentGroupFactory._get_field_docstrings
cached: dict[type, dict[str, str]] = {}


def field_docstrings(factory: ArgumentGroupFactory, kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields."""
    if kind not in cached:
        cached[kind] = read(factory, kind)
    return cached[kind]


ArgumentGroupFactory._get_field_docstrings = field_docstrings
add_megatron_arguments(ArgumentParser())
