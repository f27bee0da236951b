"""Checks of a mapping file when it is read: a mistake in a table is a sentence that names file,
table and row.

Without them a misspelled entry would mean something else, or nothing: a refusal that never fires
lets another model through.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from reshard.models.config_fields import MAPPED, WINDOW
from reshard.models.config_rows import NEEDED, NEEDED_AMOUNT, Equality
from reshard.models.numerics_args import DERIVED, NUMERICS_ARGS
from reshard.models.tables import ALWAYS, words_of

COLUMNS = ("HF parameter", "shape", "Megatron parameter", "arrangement", "split", "when")  # and marks
CONFIG_COLUMNS = ("HF config field", "Megatron argument", "relation", "default")
RELATIONS = ("=", "not")
_SIZE = r"[\w*/+]+"
_ENTRY = rf"(\{{expert\}}|:|{_SIZE}(:{_SIZE}( in {_SIZE})?)?)"
BRACKETS = re.compile(rf"[^\[\]]+\[{_ENTRY}(, {_ENTRY})*\](\.T)?")
WINDOWS = ("", "everywhere", "from max_window_layers")
NEEDED_ENTRIES = ("name", "architecture", "symbols", "config", "layer", "identifies")


def check_family(family: Any, file: str) -> None:
    """Raise ValueError, naming the file, for the first entry of a family's tables that says nothing."""
    lacking = [entry for entry in NEEDED_ENTRIES if not hasattr(family, entry)]
    if lacking:
        raise ValueError(f"{file}: {', '.join(lacking)}: every family says this, and this one does not")
    for problem in _problems(family):
        raise ValueError(f"{file}: {problem}")


def _problems(family: Any) -> Iterator[str]:
    for row in family.config:
        yield from _wrong_width("config", row, CONFIG_COLUMNS)
    fields = {spelling for field, *_ in family.config for spelling in field.split("|")}
    known = fields | set(MAPPED) | set(WINDOW) | set(family.reads)
    for field, _, relation, default in family.config:
        if relation not in RELATIONS:
            yield f"config, {field}: the relation {relation!r} is not one of {', '.join(RELATIONS)}"
        if (
            isinstance(default, str)
            and default not in (NEEDED, NEEDED_AMOUNT)
            and set(default.split("/")) - fields
        ):
            yield f"config, {field}: the default {default!r} is neither a field of the table nor 'needed'"
    for symbol, field in family.symbols.items():
        if field not in fields | {family.shared_experts}:
            yield f"symbols, {symbol}: no row of config has a field {field!r}"
    for entry in ("first_dense", "mlp_types", "shared_experts"):
        if getattr(family, entry) and not re.fullmatch(r"\w+", getattr(family, entry)):
            yield f"{entry}: {getattr(family, entry)!r} is not the name of a field"
    for argument, value in family.identifies.items():
        if NUMERICS_ARGS.get(argument, DERIVED) is DERIVED:
            yield f"identifies: {argument!r} is not an argument that decides what a model computes and has a default"
        elif argument in family.megatron and family.megatron[argument] != value:
            yield f"identifies: {argument} is {value!r}, but {family.megatron[argument]!r} in megatron"
    if family.specs and not re.fullmatch(r"[\w.]+:\w+", family.specs):
        yield f"specs: {family.specs!r} is not module:function"
    for published, _ in family.in_memory:
        if published not in {row[0] for row in family.layer}:
            yield f"in_memory, {published}: no row of layer has this name"
    if family.window not in WINDOWS:
        yield f"window: {family.window!r} is not one of {', '.join(map(repr, WINDOWS))}"
    for row in family.refused:
        yield from _wrong_width("refused", row, ("field", "values", "reason"))
        if not isinstance(row[1], tuple) or not row[1]:
            yield f"refused, {row[0]}: the values {row[1]!r} are not a tuple of mapped values"
    for row in family.equal:
        yield from _wrong_width("equal", row, ("field", "field or sum", "reason"))
        unknown = sorted(set(Equality(*row).fields[1:]) - known)
        if unknown:
            yield f"equal, {row[0]}: no row of config has a field {unknown[0]!r}"
    if not family.experts_apart and not family.packed:
        yield "experts_apart: experts that are in no file apart need places in packed"
    for table in ("packed", "packed_otherwise", "packed_codes"):
        for row in getattr(family, table):
            if row[0] not in {each[0] for each in family.layer}:
                yield f"{table}, {row[0]}: no row of layer has this name"
            yield from _wrong_cells(table, (row[1], "", "", "", "", ""), {*family.symbols, *family.derived})
    for table in ("model", "layer", "mtp"):
        for row in getattr(family, table):
            yield from _wrong_width(table, row[:-1] if len(row) == len(COLUMNS) + 1 else row, COLUMNS)
            yield from _wrong_cells(table, row, {*family.symbols, *family.derived})


def _wrong_width(table: str, row: Sequence[Any], columns: Sequence[str]) -> Iterator[str]:
    if len(row) != len(columns):
        yield f"{table}, {row[0]}: a row has {len(columns)} columns ({', '.join(columns)}), and not {len(row)}"


def _wrong_cells(table: str, row: Sequence[str], symbols: Collection[str]) -> Iterator[str]:
    name, shape, when = row[0], row[1], row[5]
    if "[" in name and not BRACKETS.fullmatch(name):
        yield (
            f"{table}, {name}: brackets hold an index, ':', 'a:b' or 'a:b in n' for each dim, with commas "
            "between, .T may follow"
        )
    letters = {
        "the shape " + repr(shape): shape,
        "the part of a tensor": name.partition("[")[2].removesuffix(".T"),
    }
    for cell, text in letters.items():
        words = re.findall(r"[A-Za-z]+", text.replace("{expert}", "").replace(" in ", " "))
        unknown = [word for word in words if word not in symbols]
        if unknown and table != "mtp":  # a family without such layers has no symbols for them
            yield f"{table}, {name}: {cell} has a letter {unknown[0]!r} that symbols does not have"
    if ALWAYS in words_of(when) and len(words_of(when)) > 1:
        yield f"{table}, {name}: {when!r} says always, and a condition"
