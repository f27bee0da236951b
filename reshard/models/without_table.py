"""Models that no mapping table covers, as tables see them: for what leads from a transformers model to an engine,
where nobody has to know how a model lies in Megatron.

Transformers says which tensors a checkpoint has (`reshard.models.saved_tensors`), and an engine's own loader where
each of them goes.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.boxes import whole
from reshard.core.errors import ReshardError, UnmappedConfigError, listed
from reshard.core.extras import require
from reshard.models.class_fields import follows_from_class
from reshard.models.config_fields import has_no_effect, ignored
from reshard.models.family import Family, architectures, has_table
from reshard.models.field_tables import NO_EFFECT, NO_EFFECT_ENDS
from reshard.models.model import Model
from reshard.models.numerics_args import same_value
from reshard.models.towers import TAKES_TOWER, TOWERS, Tower

if TYPE_CHECKING:
    from reshard.models.saved_tensors import SavedTensor

_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"(.*\bexperts\.|.*\[)(\d+)(\..+|\])")
# What larger models' configs say of prompts and of labels, and of embeddings that the language model's config has too.
_OF_PROMPTS = ("ignore_index", "video_placeholder", "use_unified_vision_chunk", "tie_word_embeddings")
# What transformers' configs of any class say by themselves.
_OF_ANY_CLASS = {
    "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "pruned_heads": {},
}  # fmt: skip
# Switches of what has weights of its own, by whose names and shapes it is known whether it is there: vLLM's config
# classes write that they are off where transformers' have none.
_SWITCHES = ("attention_output_gate", "attn_output_gate")
# Rotary settings that each kind of layer has, where they differ by kind.
_PER_LAYER = ("rope_theta", "rope_type")
_Rows = dict[str, str]  # the shapes, as expressions, by the names of rows


def any_model(config: dict[str, Any], where: str = "config.json") -> Model:
    """Return the model of a config: by the table that covers it, or by transformers' class where there is none, or
    where the table refuses the config because of what Megatron cannot hold, since none may be involved.

    Raises ReshardError if the installed transformers has no such class, or computes something as it saves; with what
    the table says before that, where one refuses the config.
    """
    refused = ""
    if has_table(config):
        try:
            return Model.from_hf(config, where)
        except UnmappedConfigError as error:
            refused = str(error)
    try:
        require("parity", "torch", "transformers")
        family = ClassFamily(config, where)
    except ReshardError as error:
        if not refused:
            raise
        if not architectures(config):  # which says nothing of the class
            raise UnmappedConfigError(refused) from None
        raise UnmappedConfigError(f"{refused}; nor can it be read without the table: {error}") from None
    family.refused_by_table = refused
    return Model(family, config, family.kinds, where=where)


def as_saved(model: Model) -> Model:
    """Return a model as transformers' class saves it, where a table has some of its tensors otherwise.

    Raises ReshardError as `any_model` does without a table.
    """
    require("parity", "torch", "transformers")
    config = model.config | {"architectures": [model.family.architecture]}
    family = ClassFamily(config, model.where)
    return Model(family, config, family.kinds, where=model.where)


def tower_of(model: Model, config: dict[str, Any]) -> Model | None:
    """Return the parts of a larger model beside the language model, which a table covers, as a model of their own: by
    transformers' class of the larger one, or by the tower's table where the installed transformers has no such class,
    or one with other names; None if it is in no larger one, or neither is there. `config` is that of the larger one.

    Raises ReshardError if transformers computes something as it saves, or the config lacks a size of the table.
    """
    from reshard.models.saved_tensors import has_class, saved_tensors

    names = architectures(config)
    if not model.wrapped or not names:
        return None
    family: ClassFamily
    table = TOWERS.get(model.family.tower)
    if not has_class(names[0]):
        if table is None:
            return None
        family = TableOfTower(table, config, model.where)
    else:
        is_own = table is not None and bool(table.in_class)
        saved = saved_tensors(names[0], _with_one_layer(config) if is_own else config, model.where)
        of_tower = {name: tensor for name, tensor in saved.items() if model.is_of_tower(name)}
        if not of_tower:
            return None
        if table is not None and is_own:
            family = TableOfTower(table, config, model.where, of_tower)
        else:
            family = ClassFamily(config, model.where, of_tower)
    return Model(family, config, family.kinds, where=model.where)


def _with_one_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a larger model whose language model has one layer: its tower is the same, and of all layers
    of a large one the trace of what transformers saves takes a minute."""
    return config | {"text_config": config["text_config"] | {"num_hidden_layers": 1}}


def check_tower(config: dict[str, Any], model: Model, where: str) -> None:
    """Raise ReshardError if the larger model of a `config` computes something else beside its language model than that
    of an engine, which takes that part too."""
    theirs = model.config.get(TAKES_TOWER)
    tower = tower_of(model, config) if theirs else None
    if tower is None or theirs is None:
        return
    for name, values in tower.family.different_fields(config, theirs).items():
        if not name.startswith("text_config"):
            raise ReshardError(
                f"{where} has {name} {values[0]}, but the served model's is {values[1]} ({model.where})"
            )


def different_beside(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    """Return the fields by which the larger models around two language models, which a table covers, compute something
    else, with both values; none unless both have the configs of those (`reshard.megatron.towers.takes_tower`)."""
    ours, theirs = a.config.get(TAKES_TOWER), b.config.get(TAKES_TOWER)
    if not (ours and theirs) or a.family.tower != b.family.tower:
        return {}
    different = different_towers(ours, theirs, TOWERS[a.family.tower])
    sections = _mrope_section(ours), _mrope_section(theirs)
    if None not in sections and sections[0] != sections[1]:
        different["mrope_section"] = sections
    return different


def _mrope_section(config: Mapping[str, Any]) -> Any:
    """Return how a language model's rotary pairs are split among the positions in an image."""
    text = config.get("text_config") or config
    return (text.get("rope_parameters") or text.get("rope_scaling") or {}).get("mrope_section")


def different_towers(a: Mapping[str, Any], b: Mapping[str, Any], tower: Tower) -> dict[str, tuple[Any, Any]]:
    """Return the fields by which two configs of larger models, of one class, make two beside their language models,
    with both values: with the defaults of transformers' class, or, where the installed transformers has none, of this
    `tower`. A field without a known default that one of them lacks is different, unless it has no effect."""
    [name, *_] = architectures(dict(b)) or [""]
    try:
        from reshard.models.saved_tensors import full_config, has_class

        known = has_class(name)
    except ReshardError:  # there is no transformers here
        known = False
    if known:
        a, b = (full_config(name, config, "the config") for config in (a, b))
    a, b = tower.filled(a), tower.filled(b)
    different = {
        field: values
        for field, values in _differing(a, b).items()
        if field[:11] != "text_config" and not _repeats_text(field, a, b)
    }
    if not known:  # a class of code beside the model may call itself otherwise
        different = {
            field: values
            for field, values in different.items()
            if not field.endswith("model_type") and not _is_left_out(field.rpartition(".")[2], values)
        }
    return different


def _is_left_out(name: str, values: tuple[Any, Any]) -> bool:
    """Return True for a field that only one of two configs has, and that computes nothing there."""
    [value, *others] = [value for value in values if value is not None]
    no_effect = name in NO_EFFECT or name in _OF_PROMPTS or name.endswith(NO_EFFECT_ENDS)
    return not others and (no_effect or (name in _OF_ANY_CLASS and value == _OF_ANY_CLASS[name]))


def _repeats_text(field: str, *configs: Mapping[str, Any]) -> bool:
    """Tell whether a field outside of the language model's config repeats what that says, in each of these configs that
    has it: trainers put such ones there for others to find."""
    having = [config for config in configs if config.get(field) is not None]
    texts = [config.get("text_config") or {} for config in having]
    return bool(having) and all(
        config[field] == text.get(field) for config, text in zip(having, texts, strict=True)
    )


def single_numbers(model: Model) -> frozenset[str]:
    """Return the tensors of a model that files have without dims, as transformers saves them, and that are vectors of
    one everywhere else."""
    saved = _saved_of(model)
    return frozenset(name for name, tensor in saved.items() if tensor.is_single)


def repeated_in_files(model: Model, names: Collection[str]) -> dict[str, str]:
    """Return which of these names of files' tensors are of what transformers' class has under another name before, and
    saves under that alone, each with that: a tied output layer, which other programs write out. Empty of a model with a
    table, which names its copies."""
    saved = _saved_of(model)
    left = [name for name in names if name not in saved]
    if not saved or not left:
        return {}
    from reshard.models.saved_tensors import repeated_names

    repeated = repeated_names(model.family.architecture, model.config, model.where)
    whole_ones = {
        tensor.parameter: name
        for name, tensor in saved.items()
        if tensor.shape == tensor.parts[0].parameter_shape
    }
    primaries = {name: whole_ones.get(repeated.get(name, "")) for name in left}
    return {name: primary for name, primary in primaries.items() if primary is not None}


def whole_dtypes(model: Model) -> dict[str, str]:
    """Return the tensors of a model that hold whole numbers, such as those that batch norms count, with the names of
    their dtypes. No cast is of them."""
    saved = _saved_of(model)
    return {name: tensor.whole_dtype for name, tensor in saved.items() if tensor.whole_dtype}


def _saved_of(model: Model) -> "Mapping[str, SavedTensor]":
    """Return the tensors that transformers saves of a model; none of one with a table, which has weights alone, with
    dims."""
    return model.family.saved if isinstance(model.family, ClassFamily) else {}


class ClassFamily(Family):
    """The models of one transformers class with one config: a table without Megatron's names, made of the tensors that
    transformers saves (`saved`; given, some of them alone)."""

    has_megatron_names = False
    symbols: dict[str, str] = {}
    config = ()
    mtp = ()
    identifies: dict[str, Any] = {}

    def __init__(
        self, config: Mapping[str, Any], where: str, saved: "Mapping[str, SavedTensor] | None" = None
    ) -> None:
        names = architectures(dict(config))
        if not names:
            raise ReshardError(f"{where} names no architectures, by which to tell which model it is")
        self.name, self.architecture = str(config.get("model_type")), names[0]
        if saved is None:
            from reshard.models.saved_tensors import saved_tensors

            saved = saved_tensors(self.architecture, config, where)
        self.saved = dict(saved)
        if not self.saved:
            raise ReshardError(
                f"{where}: transformers' {self.architecture} has no weights: name the class of a model"
            )
        self.kept_in_fp32 = frozenset(name for name, tensor in self.saved.items() if tensor.keeps_fp32)
        self.layers = _prefix_of_layers({name: prod(tensor.shape) for name, tensor in self.saved.items()})
        outer: _Rows = {}
        layers: dict[int, dict[str, tuple[int, ...]]] = {}
        for name, tensor in self.saved.items():
            inside = _NUMBERED.fullmatch(name)
            if inside is not None and inside[1] == self.layers:
                layers.setdefault(int(inside[2]), {})[inside[3]] = tensor.shape
            else:
                outer[name] = _expression(tensor.shape)
        experts = max(map(_experts, layers.values()), default=0)
        by_layer = [_rows(layers.get(layer, {}), experts) for layer in range(max(layers, default=-1) + 1)]
        words: dict[tuple[tuple[str, str], ...], str] = {}
        self.kinds = tuple(
            f"{'moe' if any('{expert}' in name for name in rows) else 'dense'} "
            f"{words.setdefault(tuple(rows.items()), f'kind{len(words)}')}"
            for rows in by_layer
        )
        self.kind_words = tuple({word: None for kind in self.kinds for word in kind.split()})
        self.derived = {"E": str(experts)} if experts else {}
        self.model = _table(outer, "always")
        self.layer = tuple(row for rows, word in words.items() for row in _table(dict(rows), word))
        super().__init__()

    @property
    def defaults(self) -> dict[str, Any]:
        return {}

    def different_fields(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        from reshard.models.saved_tensors import full_config

        ours, theirs = (full_config(self.architecture, config, "the config") for config in (a, b))
        different = _differing(ours, theirs)
        return {
            field: values for field, values in different.items() if not _repeats_text(field, ours, theirs)
        }

    def layer_kinds(self, config: dict[str, Any], where: str) -> tuple[str, ...]:
        return self.kinds

    @property
    def taking_adapters(self) -> frozenset[str]:
        """The canonical tensors to which a LoRA's B times A is added as it is."""
        return frozenset(name for name, tensor in self.saved.items() if tensor.takes_adapter)

    def name_in_memory(self, published: str) -> str:
        """Return the parameter that a published tensor is; the same name for a part of one, and for anything else."""
        saved = self.saved.get(published)
        if saved is None or saved.shape != (saved.parts[0].parameter_shape or (1,)):
            return published
        return saved.parameter or published


class TableOfTower(ClassFamily):
    """The parts beside the language model of one config, by the table of their `tower`. Where transformers has no class
    of this name, each tensor is in memory as it is published; of a class of transformers' own, `saved` are those that
    it saves."""

    def __init__(
        self,
        tower: Tower,
        config: Mapping[str, Any],
        where: str,
        saved: "Mapping[str, SavedTensor] | None" = None,
    ) -> None:
        from reshard.models.saved_tensors import SavedPart, SavedTensor

        self.tower_table, self.is_of_class = tower, saved is not None
        shapes = tower.shapes(self._published(config), where)
        if saved is None:
            by_name = {n: SavedTensor(s, (SavedPart(n, s, whole(s)),)) for n, s in shapes.items()}
        else:
            by_name = {tower.published_name(name): tensor for name, tensor in saved.items()}
            theirs = {name: tensor.shape for name, tensor in by_name.items()}
            other = sorted(n for n in shapes.keys() | theirs.keys() if shapes.get(n) != theirs.get(n))
            if other:
                raise ReshardError(
                    f"{where}: transformers saves a tower that is not the published one: it differs in "
                    f"{listed(other, 3)}"
                )
        super().__init__(config, where, by_name)

    def _published(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.is_of_class:
            return config
        from reshard.models.saved_tensors import full_config

        return self.tower_table.as_published(
            full_config(architectures(dict(config))[0], config, "the config")
        )

    def different_fields(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the fields by which a config of this class and a published one make two towers."""
        return different_towers(
            self._published(a), self.tower_table.without_class_fields(b), self.tower_table
        )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], inside: str = "") -> dict[str, tuple[Any, Any]]:
    different: dict[str, tuple[Any, Any]] = {}
    for name in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(name), b.get(name)
        if has_no_effect(name) or name in ignored() or same_value(ours, theirs):
            continue
        if name == "partial_rotary_factor" and ours in (None, 1.0) and theirs in (None, 1.0):
            continue  # vLLM writes what its absence means
        if inside + name == "text_config.is_mm_prefix_lm" and (ours, theirs) in ((None, True), (True, None)):
            continue  # vLLM 0.33's Gemma 3 writes that images are seen as a whole, as transformers computes them
        if follows_from_class(name, a, b) or follows_from_class(name, b, a):
            continue
        if inside.endswith("rope_parameters.") and name in _PER_LAYER and _by_layer(a) and _by_layer(b):
            continue  # a default of the engine's class beside those that are read
        if name in _SWITCHES and (ours, theirs) in ((None, False), (False, None)):
            continue
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            different |= _differing(ours, theirs, f"{inside}{name}.")
        else:
            different[inside + name] = ours, theirs
    return different


def _by_layer(rope: Mapping[str, Any]) -> bool:
    """Tell whether rotary settings are those of each kind of layer, all of which have their own."""
    kinds = [value for value in rope.values() if isinstance(value, Mapping)]
    return bool(kinds) and all(name in kind for kind in kinds for name in _PER_LAYER)


def _prefix_of_layers(elements: Mapping[str, int]) -> str:
    """Return what the names of the decoder layers' tensors begin with: of all that a number follows, the beginning of
    those with the most elements."""
    sizes: Counter[str] = Counter()
    for name, size in elements.items():
        inside = _NUMBERED.fullmatch(name)
        if inside is not None:
            sizes[inside[1]] += size
    return sizes.most_common(1)[0][0] if sizes else ""


def _experts(layer: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many experts a layer has, each in tensors of its own."""
    numbers = [int(of_expert[2]) for name in layer if (of_expert := _OF_EXPERT.fullmatch(name))]
    return max(numbers) + 1 if numbers else 0


def _rows(layer: Mapping[str, tuple[int, ...]], experts: int) -> _Rows:
    """Return the rows of a layer; tensors that each of so many experts has are one."""
    rows: _Rows = {}
    of_experts: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, shape in layer.items():
        of_expert = _OF_EXPERT.fullmatch(name)
        if of_expert is None:
            rows[name] = _expression(shape)
        else:
            of_experts.setdefault(f"{of_expert[1]}{{expert}}{of_expert[3]}", {})[int(of_expert[2])] = shape
    for name, shapes in of_experts.items():
        if shapes.keys() == set(range(experts)) and len({*shapes.values()}) == 1:
            rows[name] = _expression(shapes[0])
        else:
            rows |= {
                name.replace("{expert}", str(number)): _expression(shape) for number, shape in shapes.items()
            }
    return rows


def _expression(shape: tuple[int, ...]) -> str:
    return " ".join(map(str, shape))


def _table(rows: _Rows, when: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name, shape, name, "plain", "-", when) for name, shape in rows.items())
