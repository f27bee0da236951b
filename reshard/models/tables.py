"""The notation of mapping tables: what a row says, and what the expressions in it stand for.

A row ties one published parameter to its place in a Megatron parameter:

| column             | meaning                                                                                      |
|--------------------|----------------------------------------------------------------------------------------------|
| HF parameter       | the published name; in `layer` and `mtp` rows without ``model.layers.{layer}.``; a row with  |
|                    | ``{expert}`` stands for one tensor of each routed expert. Brackets after the name say which  |
|                    | part of a published tensor it is: ``gate_up_proj[{expert}, 0:F]``,                           |
|                    | ``q_proj.weight[0:D in 2*D]``, ``down_proj[{expert}].T``, see `reshard.core.views`           |
| shape              | of that tensor, in the family's `symbols`; ``NQ*D H`` is two dims                            |
| Megatron parameter | its name in a checkpoint of Transformer Engine layers, without ``decoder.layers.{layer}.``   |
| arrangement        | where its rows lie in the Megatron parameter (below)                                         |
| split              | ``tp 0``: axis tp splits dim 0; ``etp``: expert tensor parallel; ``-``: every rank has all   |
|                    | of it; a leading ``local`` means that only Megatron's local layers split it                  |
| when               | what must hold, with commas between: a word of the layer's kind, such as ``dense`` or        |
|                    | ``moe``; a field of the config; ``not`` and one of these; or ``always``                      |
| marks              | may be left out. ``optional``: a checkpoint may lack it; ``fp32``: it is never cast down;    |
|                    | ``unquantized``: a linear layer that quantized checkpoints keep as it is; ``less 1``:        |
|                    | Megatron holds the value less 1, as its norms do with ``--apply-layernorm-1p``               |

Arrangements are a closed set. Rows that share a Megatron parameter fill it together, in table order:

- ``plain``: the whole parameter, as it is.
- ``vocab``: rows 0 .. vocab_size; the padding rows after them are zero.
- ``q``, ``k``, ``v``: per query group, its query heads, then its key, then its value. Of two ``q``
  the second are the gates of an attention's outputs. A row alone is the whole parameter; an engine
  splits it by heads, as it splits attention.
- ``gate``, ``up``: all gate rows, then all up rows; each half is split on its own.
- ``copy``: the same bytes as the parameter's other row, which Megatron holds once.
- ``ignored``: carries no weight; dropped on purpose.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

ARRANGEMENTS = ("plain", "vocab", "q", "k", "v", "gate", "up", "copy", "ignored")
HEADS = ("q", "k", "v")
SPLITS = ("-", "tp 0", "tp 1", "etp 0", "etp 1")
ALWAYS = "always"
MARKS = ("optional", "fp32", "unquantized", "less 1")
# Megatron's names of matrices that no published checkpoint quantizes: routers, gates, and what is not in a layer.
_IN_FULL = ("mlp.router.", "mlp.shared_experts.gate_weight", "eh_proj.", "output_layer.", "embedding.")


@dataclass(frozen=True)
class Row:
    """One line of a mapping table; the module docstring explains the fields."""

    hf: str
    shape: str
    megatron: str
    arrangement: str
    split: str
    when: str
    marks: str = ""

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        """The conditions under which the row applies, all of them."""
        return words_of(self.when)

    @property
    def optional(self) -> bool:
        """True where a checkpoint may lack the parameter."""
        return "optional" in words_of(self.marks)

    @property
    def fp32(self) -> bool:
        """True where the parameter keeps its precision when the others are cast down."""
        return "fp32" in words_of(self.marks)

    @property
    def less_1(self) -> bool:
        """True where Megatron holds the published value less 1."""
        return "less 1" in words_of(self.marks)

    @property
    def quantizable(self) -> bool:
        """True for the weight of a linear layer, of attention, an MLP or experts: what published
        checkpoints in fp8 quantize. Megatron names these modules ``linear_*``; its routers,
        embeddings, output layers and the projection before an MTP layer have other names, and stay
        as they are."""
        *_, module, parameter = ("", *self.megatron.rsplit(".", 2))
        linear = parameter == "weight" and module.startswith("linear_") and "[" not in self.hf
        return linear and len(self.shape.split()) == 2 and "unquantized" not in words_of(self.marks)

    @property
    def kept_in_full(self) -> bool:
        """True for the other weights of a layer's products, which quantizing leaves as they are: those of which one
        published tensor has several, and those of linear attention and Mamba."""
        matrix = self.arrangement not in ("copy", "ignored") and len(self.shape.split()) == 2
        known = self.megatron.startswith(_IN_FULL) or "unquantized" in words_of(self.marks)
        return matrix and not known and not self.quantizable

    @property
    def of_experts(self) -> bool:
        """True where the row stands for a tensor of each routed expert."""
        return "{expert}" in self.hf

    def names(self, prefix: str, experts: Iterable[int]) -> Iterator[tuple[int | None, str]]:
        """Yield (expert, published name) of every tensor that the row stands for: one for each of
        these experts, or a single one.

        >>> list(Row("experts.{expert}.up", "F H", "fc1", "up", "etp 0", "moe").names("model.", [4, 5]))
        [(4, 'model.experts.4.up'), (5, 'model.experts.5.up')]
        """
        if not self.of_experts:
            yield None, prefix + self.hf
            return
        for expert in experts:
            yield expert, prefix + self.hf.replace("{expert}", str(expert))

    def in_numbers(self, symbols: Mapping[str, int]) -> "Row":
        """Return the row with the expressions in the brackets of its name as numbers."""
        return replace(self, hf=in_numbers(self.hf, symbols)) if "[" in self.hf else self

    def split_of(self, transformer_impl: str) -> tuple[str, int] | None:
        """Return the mesh axis and the dim that it splits, or None if every rank has all of the
        parameter."""
        words = self.split.split()
        if words == ["-"] or (words[0] == "local" and transformer_impl != "local"):
            return None
        return words[-2], int(words[-1])


def read_rows(table: Iterable[tuple[str, ...]], file: str, known: Iterable[str]) -> tuple[Row, ...]:
    """Read the rows of a table, whose conditions may name these `known` words and fields. Raises
    ValueError, naming the file, where a row does not follow the columns."""
    rows, known = tuple(Row(*row) for row in table), {ALWAYS, *known}
    for row in rows:
        if row.arrangement not in ARRANGEMENTS:
            raise ValueError(f"{file}: no arrangement is called {row.arrangement!r} ({row.hf})")
        if row.split.removeprefix("local ") not in SPLITS:
            raise ValueError(f"{file}: {row.split!r} does not say which axis splits which dim ({row.hf})")
        for condition in row.conditions:
            if condition.removeprefix("not ") not in known:
                raise ValueError(f"{file}: nothing maps the condition {condition!r} ({row.hf})")
        for mark in words_of(row.marks):
            if mark not in MARKS:
                raise ValueError(f"{file}: no mark is called {mark!r} ({row.hf})")
    return rows


def words_of(entry: str) -> tuple[str, ...]:
    """Return the words of an entry with commas between them.

    >>> words_of("moe, not tie_word_embeddings")
    ('moe', 'not tie_word_embeddings')
    """
    return tuple(word.strip() for word in entry.split(",") if word.strip())


def shape_of(expression: str, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape that a table's expression stands for.

    >>> shape_of("NQ*D+2*D H", {"NQ": 4, "D": 8, "H": 64})
    (48, 64)
    """
    return tuple(size_of(dim, symbols) for dim in expression.split())


def size_of(expression: str, symbols: Mapping[str, int]) -> int:
    """Return the number that a sum of products and quotients of symbols stands for."""
    return sum(_product(term, symbols) for term in expression.split("+"))


def in_numbers(name: str, symbols: Mapping[str, int]) -> str:
    """Return a name with the expressions in its brackets as numbers.

    >>> in_numbers("q_proj.weight[0:D in 2*D]", {"D": 8})
    'q_proj.weight[0:8 in 16]'
    >>> in_numbers("experts.gate_up_proj[{expert}, F:2*F].T", {"F": 32})
    'experts.gate_up_proj[{expert}, 32:64].T'
    """
    tensor, bracket, selections = name.partition("[")
    if not bracket:
        return name
    numbers = re.sub(r"(?<![{\w.])[\w*/+]+", lambda match: _number(match[0], symbols), selections)
    return tensor + bracket + numbers


def _number(expression: str, symbols: Mapping[str, int]) -> str:
    return expression if expression == "in" else str(size_of(expression, symbols))


def _product(term: str, symbols: Mapping[str, int]) -> int:
    numerator, *denominators = term.split("/")

    def factor(text: str) -> int:
        return int(text) if text.isdigit() else symbols[text]

    return prod(map(factor, numerator.split("*"))) // prod(map(factor, denominators))
