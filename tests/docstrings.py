"""The docstrings that Megatron reads of its own sources, for the help of its command line, are read once, before ranks are forked."""

from argparse import ArgumentParser

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

read = ArgumentGroupFactory._get_field_docstrings
known: dict[type, dict[str, str]] = {}


def field_docstrings(factory: ArgumentGroupFactory, kind: type) -> dict[str, str]:
    """Those of a dataclass."""
    if kind not in known:
        known[kind] = read(factory, kind)
    return known[kind]


ArgumentGroupFactory._get_field_docstrings = field_docstrings
add_megatron_arguments(ArgumentParser())
