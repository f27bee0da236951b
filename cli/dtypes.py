"""Dtypes on the command line."""

from typing import Any

import click

LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class DtypeChoice(click.Choice):
    """A choice of dtypes by their short names; torch's names are understood too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(LONG_NAMES.get(value, value), param, ctx)
