"""Parity between transformers and Megatron-Core on ranks of their own."""

import logging

from reshard.errors import ReshardError
from reshard.layout import Layout
from reshard.parity.gate import parity


def run(rank: int, a: str, b: str, layout: dict, options: dict):
    """The report, or what was refused."""
    logging.disable(logging.WARNING)
    try:
        report = parity(a, b, layout=Layout(**layout), **options)
    except ReshardError as error:
        return str(error)
    return report.to_dict()
