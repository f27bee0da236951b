"""Mapping tables: one file of literals per family, under `mappings/`, and what their rows say.

A row ties one Hugging Face parameter to its place in a Megatron parameter, and in vLLM's:

| column             | meaning                                                                                             |
|--------------------|-----------------------------------------------------------------------------------------------------|
| HF parameter       | the published name; in LAYER and MTP rows without ``model.layers.{layer}.``                         |
| shape              | of that tensor, in the family's SYMBOLS; ``NQ*D H`` is two dims                                     |
| Megatron parameter | its name in a checkpoint of Transformer Engine layers, without ``decoder.layers.{layer}.``          |
| local spec         | the name in a checkpoint of local layers, ``=`` for the same                                        |
| vLLM parameter     | the parameter of vLLM that it is part of, ``=`` for the published name; empty where vLLM has none   |
| arrangement        | where its rows lie in the Megatron parameter (below)                                                |
| split              | ``tp 0``: axis tp splits dim 0; ``etp``: expert tensor parallel; ``-``: every rank has all of it; a |
|                    | leading ``local`` means that only local layers split it                                             |
| where              | layer kinds and config flags that must hold; ``optional``: may be absent; ``fp32``: never cast down |

Arrangements are a closed set. Rows that share a Megatron parameter fill it together, in table order:

- ``plain``: the whole parameter, as it is.
- ``vocab``: rows 0 .. vocab_size; the padding rows after them are zero.
- ``q``, ``k``, ``v``: per query group, its query heads, then its key, then its value. vLLM: all queries, all keys, all values.
- ``gate``, ``up``: all gate rows, then all up rows; each half is split on its own.
- ``copy``: the same bytes as the parameter's other row, which Megatron holds once.
- ``ignored``: carries no weight; dropped on purpose.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType

from reshard.errors import ReshardError, listed

ARRANGEMENTS = ("plain", "vocab", "q", "k", "v", "gate", "up", "copy", "ignored")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a mapping table; the module docstring explains the fields."""

    hf: str
    shape: str
    megatron: str
    local: str
    vllm: str
    arrangement: str
    split: str
    where: str

    @property
    def conditions(self) -> tuple[str, ...]:
        """What must hold for the row to apply, without the words that say something else."""
        return tuple(word for word in self.where.split() if word not in ("always", "optional", "fp32"))

    @property
    def optional(self) -> bool:
        """Whether a checkpoint may lack the parameter."""
        return "optional" in self.where.split()

    @property
    def fp32(self) -> bool:
        """Whether the parameter keeps its precision when the others are cast down."""
        return "fp32" in self.where.split()

    def split_of(self, transformer_impl: str) -> tuple[str, int] | None:
        """The mesh axis and the dim that it splits, or None where every rank has all of the parameter."""
        words = self.split.split()
        if words == ["-"] or (words[0] == "local" and transformer_impl != "local"):
            return None
        return words[-2], int(words[-1])


@dataclass(frozen=True)
class Family:
    """A mapping file, with its rows read."""

    name: str
    architecture: str
    table: ModuleType
    model: tuple[Row, ...]
    layer: tuple[Row, ...]
    mtp: tuple[Row, ...]


@cache
def families() -> dict[str, Family]:
    """All families, by name. Raises ValueError where a mapping file does not follow the columns."""
    package = importlib.import_module("reshard.mappings")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        table = importlib.import_module(f"reshard.mappings.{module.name}")
        blocks = [tuple(Row(*row) for row in block) for block in (table.MODEL, table.LAYER, table.MTP)]
        for row in (row for block in blocks for row in block):
            if row.arrangement not in ARRANGEMENTS:
                raise ValueError(f"mappings/{module.name}.py: no arrangement is called {row.arrangement!r} ({row.hf})")
            if row.split.split()[-2:-1] not in ([], ["tp"], ["etp"]):
                raise ValueError(f"mappings/{module.name}.py: no axis is called {row.split!r} ({row.hf})")
        found[table.FAMILY] = Family(table.FAMILY, table.ARCHITECTURE, table, *blocks)
    return found


def family_of(config: dict, where: str) -> Family:
    """The family of a Hugging Face config. Raises ReshardError, naming the nearest, where no table covers it."""
    names = [str(name) for name in (config.get("architectures") or [])]
    for family in families().values():
        if family.architecture in names or (not names and config.get("model_type") == family.name):
            return family
    wanted = names[0] if names else str(config.get("model_type") or "")
    known = {family.architecture: family for family in families().values()}
    if not wanted:
        raise ReshardError(f"{where} names neither architectures nor model_type; the known ones are {listed(sorted(known))}")
    import difflib

    nearest = max(known, key=lambda name: difflib.SequenceMatcher(None, name.lower(), wanted.lower()).ratio())
    raise ReshardError(
        f"{where}: architecture {wanted} has no mapping table; the nearest is {nearest} "
        f"(all: {listed(sorted(known))}), see 'Add an architecture' in the README"
    )


def shape_of(expression: str, symbols: dict[str, int]) -> tuple[int, ...]:
    """The shape that a table's expression stands for.

    >>> shape_of("NQ*D+2*D H", {"NQ": 4, "D": 8, "H": 64})
    (48, 64)
    """
    return tuple(sum(_product(term, symbols) for term in dim.split("+")) for dim in expression.split())


def _product(term: str, symbols: dict[str, int]) -> int:
    numerator, *denominators = term.split("/")
    value = prod(int(f) if f.isdigit() else symbols[f] for f in numerator.split("*"))
    for denominator in denominators:
        value //= int(denominator)
    return value


def rows_that_hold(rows: Iterable[Row], flags: set[str]) -> list[Row]:
    """The rows whose conditions are all among `flags`."""
    return [row for row in rows if all(word in flags for word in row.conditions)]
