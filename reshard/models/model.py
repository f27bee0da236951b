"""A model as its Hugging Face config describes it: family, sizes, layer kinds."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError, UnmappedConfigError, listed
from reshard.core.views import tensor_of
from reshard.models.config_fields import ignore_hint, unmapped_configs_allowed
from reshard.models.config_reading import read_config
from reshard.models.family import Family
from reshard.models.field_tables import DECIDES_ELSEWHERE
from reshard.models.numerics_args import NUMERICS_ARGS, same_value
from reshard.models.rope import inverse_frequencies
from reshard.models.tables import ALWAYS, Row, shape_of, size_of
from reshard.models.towers import TAKES_TOWER, lacking_of_tower


class Block(NamedTuple):
    """Parameters that stand together: what their published and their Megatron names begin with, the number of
    the layer (of the MTP layer) that they are in, and the rows that apply to it."""

    published: str
    megatron: str
    layer: int | None
    mtp: bool
    rows: list[Row]


@dataclass(frozen=True)
class Model:
    """A model as the mapping tables see it.

    `config` is the Hugging Face config with the family's defaults filled in, `kinds` has the words
    of each decoder layer's kind, such as ``dense`` or ``moe``, `mtp_layers` is the number of
    multi-token-prediction layers, `where` names the config in error messages. `wrapped` is True for
    the language model of a larger one, whose names begin with ``model.language_model.``. `ignored`
    has a sentence for each field or argument that was there, and was ignored as was asked.
    """

    family: Family
    config: dict[str, Any]
    kinds: tuple[str, ...]
    mtp_layers: int = 0
    wrapped: bool = False
    where: str = field(default="config.json", compare=False)
    ignored: dict[str, str] = field(default_factory=dict, compare=False)
    unread: tuple[str, ...] = field(default=(), compare=False)
    objections: list[str] = field(default_factory=list, compare=False)

    @staticmethod
    def from_hf(config: dict[str, Any], where: str = "config.json") -> "Model":
        """Read a Hugging Face config. Raises ReshardError for a missing field or a setting that Megatron
        cannot hold."""
        try:
            read = read_config(config, where)
            model = Model(
                family=read.family,
                config=read.config,
                kinds=read.kinds,
                mtp_layers=read.mtp_layers,
                wrapped=read.wrapped,
                where=where,
                ignored=read.ignored,
                unread=read.unmapped.unread,
            )
            with model.objecting():
                _check_meaning(model, read.unmapped.sentence)
            with model.objecting():
                model.family.rope_args(model.config, where)  # refuse now what Megatron has no setting for
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ReshardError(
                f"{where} has a setting that cannot be read ({type(error).__name__}: {error})"
            ) from error
        return model

    @contextmanager
    def objecting(self) -> Iterator[None]:
        """Record a ReshardError raised inside as an objection, where `allow_unmapped_configs` says
        so; else raise it as an UnmappedConfigError."""
        try:
            yield
        except ReshardError as error:
            if not unmapped_configs_allowed():
                raise UnmappedConfigError(str(error)) from error
            self.objections.append(f"cannot be mapped: {error}")

    def known_names(self) -> set[str]:
        """The names of fields and arguments that can be ignored: those that were, and all that the family or
        Megatron's arguments have."""
        family = self.family
        return {
            *self.ignored,
            *family.fields,
            *family.always,
            *family.defaults,
            *(() if family.has_megatron_names else self.config),
            *DECIDES_ELSEWHERE,
            *NUMERICS_ARGS,
        }

    @property
    def notices(self) -> list[str]:
        """Sentences for the user: objections, fields that were ignored, and fields that nobody reads."""
        unread = listed(self.unread)
        note = (
            f"{self.where}: transformers' {self.family.architecture} does not read {unread}, and neither "
            "does reshard"
        )
        return [*self.objections, *self.ignored.values(), *([note] if self.unread else [])]

    @property
    def num_layers(self) -> int:
        """Decoder layers, without those for multi-token prediction."""
        return len(self.kinds)

    @cached_property
    def symbols(self) -> dict[str, int]:
        """The letters of the family's shapes with this model's sizes."""
        values = {symbol: self.config.get(name) for symbol, name in self.family.symbols.items()}
        symbols = {symbol: int(value) for symbol, value in values.items() if value is not None}
        for symbol, expression in self.family.derived.items():
            symbols[symbol] = size_of(expression, symbols)
        return symbols

    def shape(self, expression: str) -> tuple[int, ...]:
        """The shape that a table's expression, such as ``NQ*D H``, stands for in this model."""
        shape = self._shapes.get(expression)
        if shape is None:
            shape = self._shapes[expression] = shape_of(expression, self.symbols)
        return shape

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    @property
    def tied(self) -> bool:
        """True where the output layer is the embedding."""
        return bool(self.config.get("tie_word_embeddings"))

    def value_of(self, argument: str) -> Any:
        """Return the config's value for an argument of Megatron's; None if it has no field for it."""
        name = self.family.field_of(argument)
        return None if name is None else self.config.get(name)

    @cached_property
    def num_experts(self) -> int:
        """Routed experts in each MoE layer; 0 for a dense model."""
        return self.symbols.get("E", 0) if self.moe_layers else 0

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the decoder layers that have experts."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if has_experts(kind))

    @cached_property
    def mtp_kinds(self) -> tuple[str, ...]:
        """The kinds of the decoder layers in each MTP layer: of most families one."""
        return self.family.mtp_kinds(self.kinds)

    @cached_property
    def uniform(self) -> bool:
        """True where all decoder layers are of one kind, so that Megatron stacks them under one key."""
        return len(set(self.kinds)) == 1

    @property
    def shared_width(self) -> int:
        """The width of the experts that every token goes to, together; 0 if there are none."""
        if not self.family.shared_experts:
            return int(self.value_of("moe_shared_expert_intermediate_size") or 0) if self.num_experts else 0
        count = self.config.get(self.family.shared_experts) or 0
        return int(count) * int(self.value_of("moe_ffn_hidden_size")) if self.num_experts and count else 0

    @property
    def expert_groups(self) -> tuple[int, int]:
        """Number of expert groups, and of groups that a token's experts are taken from; (1, 1)
        without groups."""
        return int(self.value_of("moe_router_num_groups") or 1), int(
            self.value_of("moe_router_group_topk") or 1
        )

    def holds(self, conditions: Iterable[str], kind: str = "") -> bool:
        """Return True if all these conditions of a row hold for a layer of this kind."""
        return all(self._holds(condition, kind) for condition in conditions)

    def _holds(self, condition: str, kind: str) -> bool:
        if condition == ALWAYS:
            return True
        if condition.startswith("not "):
            return not self._holds(condition.removeprefix("not "), kind)
        if condition in self.family.kind_words:
            return condition in kind.split()
        return bool(self.config.get(condition))

    def rows(self, block: str, kind: str = "") -> list[Row]:
        """The rows of a block (``model``, ``layer``, ``mtp``) that apply to a layer of this kind."""
        rows = self._rows.get((block, kind))
        if rows is None:
            rows = [
                row.in_numbers(self.symbols)
                for row in self.family.rows[block]
                if self.holds(row.conditions, kind)
            ]
            if block == "model":  # of others the prefix comes before their names
                rows = [replace(row, hf=self.published_name(row.hf)) for row in rows]
            self._rows[block, kind] = rows
        return rows

    def published_name(self, name: str) -> str:
        """Return a name as this model's files have it; where it is wrapped, behind another prefix."""
        prefix, wrapped = self.family.wrapped_names
        return wrapped + name.removeprefix(prefix) if self.wrapped and name.startswith(prefix) else name

    @cached_property
    def towers(self) -> tuple[str, ...]:
        """The beginnings of the published names of tensors that are carried from disk to disk unchanged: not
        those of MTP layers that the config announces, but those of one that it does not."""
        family, (own, *inside) = self.family, self.mtp_prefixes(0)
        towers = () if family.wrapped_in[0] and not self.wrapped else family.towers
        if self.mtp_layers:
            return tuple(t for t in towers if not any(name.startswith(t) for name in (own, *inside)))
        return towers if own in towers or not family.field_of("mtp_num_layers") else (*towers, own)

    def is_of_tower(self, name: str) -> bool:
        """Return True for a published tensor that is carried along, of another part of a larger model for one."""
        return name.startswith(self.towers)

    def tower_notices(self, config: Mapping[str, Any], names: Collection[str]) -> list[str]:
        """Return a sentence on what the tower that a whole ``config.json`` announces lacks, if these are its tensors'
        names."""
        lacking = lacking_of_tower(self.family.tower, config, names) if self.wrapped else []
        if not lacking:
            return []
        tensors = "1 tensor" if len(lacking) == 1 else f"{len(lacking)} tensors"
        return [f"the files lack {tensors} of the tower that config.json announces: {listed(lacking, 3)}"]

    def layer_prefix(self, layer: int) -> str:
        """Return what the published names of a decoder layer begin with."""
        return self.published_name(f"{self.family.layers}{layer}.")

    def mtp_prefixes(self, index: int) -> tuple[str, ...]:
        """Return what the published names of an MTP layer's own tensors, and of those of each
        decoder layer in it, begin with."""
        numbers = {"layers": self.family.layers, "layer": self.num_layers + index, "index": index}
        own, inside = self.family.mtp_prefixes
        prefixes = (own, *(inside for _ in self.mtp_kinds))
        return tuple(
            self.published_name(prefix.format(part=max(place - 1, 0), **numbers))
            for place, prefix in enumerate(prefixes)
        )

    @cached_property
    def _rows(self) -> dict[tuple[str, str], list[Row]]:
        return {}

    def blocks(self) -> Iterator["Block"]:
        """Yield the model's blocks in the order of its names: the parameters outside the layers,
        each decoder layer, each MTP layer."""
        yield Block("", "", None, False, self.rows("model"))
        for layer, kind in enumerate(self.kinds):
            yield Block(self.layer_prefix(layer), "decoder.layers.", layer, False, self.rows("layer", kind))
        for index in range(self.mtp_layers):
            (own, *inside), prefix = self.mtp_prefixes(index), f"mtp.layers.{index}."
            yield Block(own, prefix, index, True, self.rows("mtp", self.mtp_kinds[-1]))
            for published, kind in zip(inside, self.mtp_kinds, strict=True):
                yield Block(published, f"{prefix}transformer_layer.", index, True, self.rows("layer", kind))

    def names_in_memory(self) -> dict[str, str]:
        """Return the published names of parameters that a transformers model has under other names, by
        those; of parts of a tensor its name."""
        renamed, family = dict(self.family.in_memory), self.family
        return {
            tensor_of(family.name_in_memory(in_memory)): tensor_of(published)
            for block in self.blocks()
            for row in block.rows
            if row.hf in renamed
            or any(family.in_memory_prefix)
            or self.wrapped
            or not family.has_megatron_names
            for (_, in_memory), (_, published) in zip(
                replace(row, hf=renamed.get(row.hf, row.hf)).names(block.published, range(self.num_experts)),
                row.names(block.published, range(self.num_experts)),
                strict=True,
            )
        }

    def places_in_memory(self) -> dict[str, str]:
        """Return, by the published names of experts' matrices, the parts that they are of the tensors in which a
        transformers model has all experts of a layer: ``gate_up_proj [E, 2*F, H]`` and ``down_proj [E, H, F]``."""
        places: dict[str, str] = {}
        renamed = dict(self.family.in_memory)
        for block in self.blocks():
            rows = {
                renamed.get(row.hf, row.hf): row for row in block.rows if row.of_experts and "[" not in row.hf
            }
            gated = any(name.endswith(".gate_proj.weight") for name in rows)
            for name, row in rows.items():
                module, _, part = name.removesuffix(".weight").rpartition(".{expert}.")
                height = self.shape(row.shape)[0]
                first = height * (part == "up_proj")
                half = gated and part != "down_proj"
                where = (
                    f"gate_up_proj[{{expert}}, {first}:{first + height}]" if half else f"{part}[{{expert}}]"
                )
                experts = range(self.num_experts)
                parts = replace(row, hf=f"{module}.{where}").names(block.published, experts)
                named = zip(row.names(block.published, experts), parts, strict=True)
                places |= {published: place for (_, published), (_, place) in named}
        return places

    def quantizable(self) -> frozenset[str]:
        """The published names of the weights that checkpoints in fp8 quantize."""
        return self._names_of(lambda row: row.quantizable)

    def kept_in_full(self) -> frozenset[str]:
        """The published names of linear weights that these do not quantize, see `Row.kept_in_full`."""
        return self._names_of(lambda row: row.kept_in_full)

    def _names_of(self, chosen: Callable[[Row], bool]) -> frozenset[str]:
        return frozenset(
            name
            for block in self.blocks()
            for row in block.rows
            if chosen(row)
            for _, name in row.names(block.published, range(self.num_experts))
        )

    def rope(self) -> dict[str, Any]:
        """The rotary settings of the config, see `reshard.models.rope.rope_of`."""
        return self.family.rope(self.config, self.where)

    def inverse_frequencies(self) -> list[float]:
        """The angles, in radians, by which its rotary embedding turns each pair of dims from one position to
        the next."""
        rope = self.rope()
        dims = int(self.symbols[self.family.rotary] * rope["partial_rotary_factor"])
        return inverse_frequencies(rope, dims)


def has_experts(kind: str) -> bool:
    """Return True for the kind of a layer that has experts."""
    return "moe" in kind.split()


def different_fields(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    """Return the fields by which two configs make two models of the same weights, with both values;
    rotary settings as ``rope_parameters``."""
    same_class = a.family.architecture == b.family.architecture
    of_class = [model.family for model in (a, b) if not model.family.has_megatron_names]
    # A table takes the config of the other one.
    if len(of_class) == 1 and same_class and of_class[0].refused_by_table:
        return _differing_from_class(a, b)
    same_class |= not of_class
    if (
        (a.family.name, a.family.has_megatron_names) != (b.family.name, b.family.has_megatron_names)
    ) or not same_class:
        return {"architectures": (a.family.architecture, b.family.architecture)}
    if not a.family.has_megatron_names:
        return a.family.different_fields(a.config, b.config)
    different = {}
    for row in a.family.config_rows:
        values = a.config[row.field], b.config[row.field]
        if row.argument in NUMERICS_ARGS and not same_value(*values):
            different[row.field] = values
    if a.num_layers == b.num_layers and a.kinds != b.kinds:
        if a.moe_layers != b.moe_layers:
            different["layers with experts"] = (a.moe_layers, b.moe_layers)
        else:
            different["kinds of layers"] = (a.kinds, b.kinds)
    derived = [model.family.derived_args(model.config) for model in (a, b)]
    if not different and not same_value(*derived):
        different |= {name: tuple(args[name] for args in derived) for name in derived[0]}
    if not same_value(a.family.rope_args(a.config, a.where), b.family.rope_args(b.config, b.where)):
        different["rope_parameters"] = (a.rope(), b.rope())
    return different


def _differing_from_class(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    """Return the fields by which two configs, one of which a table has read, make two models of one class, as that
    class reads them. Those that only the table has filled in are left out, where others differ."""
    model, other = (a, b) if a.family.has_megatron_names else (b, a)
    config = model.config.get(TAKES_TOWER, model.config)
    # Of a larger model this is the language model's alone.
    if model.wrapped and TAKES_TOWER not in model.config:
        config = other.config | {"text_config": model.config}
    pair = (config, other.config) if model is a else (other.config, config)
    different = other.family.different_fields(*pair)
    of_class = int(other is b)
    return {name: values for name, values in different.items() if values[of_class] is not None} or different


def why_named_otherwise(a: Model, b: Model) -> str:
    """Return why two models have the tensors of one checkpoint under other names: the config of one was read by a
    table, and that of the other, which the table refuses, by transformers' class. Empty where both were read alike."""
    of_class = [m for m in (a, b) if not m.family.has_megatron_names and m.family.refused_by_table]
    of_table = [m for m in (a, b) if m.family.has_megatron_names]
    if not (of_class and of_table):
        return ""
    [model], [other] = of_class, of_table
    if other.ignored:
        return (
            f"{other.where} is read without its {listed(other.ignored)}, and {model.where} is not, so that their "
            f"tensors have other names: ignore the same on both sides, by {ignore_hint(other.ignored)}"
        )
    return (
        f"{other.where} is read by a mapping table, and {model.where} by transformers' class, so that their tensors "
        f"have other names: {model.family.refused_by_table}"
    )


def _check_meaning(model: Model, unmapped_fields: str) -> None:
    """Raise ReshardError, naming them all, for fields by which the weights make a model that Megatron cannot
    hold, or that nothing maps: a sentence says which those are, empty without any."""
    family, config = model.family, model.config
    wrong = [refusal.sentence(config) for refusal in family.refusals]
    window = family.window_of(config)
    wrong.append(f"{window} makes layers attend to a window, which is not mapped" if window else "")
    wrong.append(unmapped_fields)
    if any(wrong):
        raise ReshardError(f"{model.where}: {'; '.join(filter(None, wrong))}")
