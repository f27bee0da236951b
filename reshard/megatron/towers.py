"""The towers around a language model that is trained under Megatron: what trainers call their tensors, and how these
lie in Megatron's parameters.

A trainer's larger model has its language model as a module, and the tower beside it on the first pipeline stage. To add
a trainer, add a line to `HOLDERS`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import Part
from reshard.megatron.parameters import ModelParameters, Parameter
from reshard.models.model import Model
from reshard.models.tables import shape_of
from reshard.models.towers import TAKES_TOWER, TOWERS, Tower, TowerBlock, TowerRow, count_of

# What the names of the language model begin with in the larger model.
LANGUAGE_MODEL = "language_model."


class TowerHolder(NamedTuple):
    """A trainer's way to hold towers: what their names begin with in its model, and what instead when published.

    Nothing is published of a tower that is made of Megatron's layers, whose names the tower's table has.
    """

    trainer: str
    names: tuple[tuple[str, str], ...]


HOLDERS = (
    # trainer                            in its model              published
    TowerHolder("mcore-bridge",         (("visual.visual.",        "model.visual."),
                                         ("visual.visual.",        "visual."),
                                         ("visual.vision_tower.",  "vision_tower."),
                                         ("visual.mm_projector.",  "mm_projector."))),
    TowerHolder("Megatron-Bridge",      (("visual.",               "model.visual."),
                                         ("visual.",               "visual."),
                                         ("vision_tower.",         "vision_tower."),
                                         ("mm_projector.",         "mm_projector."))),
    TowerHolder("Megatron-Bridge",      (("vision_model.",         ""),)),
)  # fmt: skip
BEGINNINGS = tuple(dict.fromkeys(prefix for holder in HOLDERS for prefix, _ in holder.names))
# Parameters that Megatron's local layers have under other names than Transformer Engine's.
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def takes_tower(model: Model, config: Mapping[str, Any]) -> Model:
    """Return a model with the config of the larger model around it, whose tower then belongs to what is read, saved or
    refitted; the same model if it is in none, or no table says what its tower is."""
    if not model.wrapped or not model.family.tower or TAKES_TOWER in model.config:
        return model
    return replace(model, config=model.config | {TAKES_TOWER: dict(config)})


def text_key(key: str) -> str:
    """Return the key that a tensor of the language model has where that model is by itself."""
    return key.removeprefix(LANGUAGE_MODEL)


def as_text_args(args: Mapping[str, Any], model: Model, where: object) -> dict[str, Any]:
    """Return Megatron's arguments of the language model in a larger one as those of the same model for text: its
    rotary embeddings have sections for the positions in images, which are the same for text.

    Raises ReshardError if the sections are other ones than those of `model`, whose tower is taken too.
    """
    settings = dict(args)
    if not model.wrapped or settings.get("position_embedding_type") != "mrope":
        return settings
    rope = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    own, theirs = settings.pop("mrope_section", None), rope.get("mrope_section")
    if own is not None and theirs is not None and list(own) != list(theirs) and TAKES_TOWER in model.config:
        raise ReshardError(
            f"{where} has mrope_section {list(own)}, but that of {model.where} is {list(theirs)}: images would have "
            f"other positions"
        )
    return settings | {"position_embedding_type": "rope"}


def of_towers(keys: Iterable[str]) -> list[str]:
    """Return the keys of the tensors of a tower."""
    return [key for key in keys if key.startswith(BEGINNINGS) and "._extra_state" not in key]


def with_tower(
    parameters: ModelParameters, model: Model, keys: Collection[str], where: object
) -> ModelParameters:
    """Return the parameters of a language model with those of the tower around it, as `model` takes it (`takes_tower`);
    the same if it takes none, or if there is none among these keys.

    Raises ReshardError if its names are those of no trainer that is known.
    """
    config, own = model.config.get(TAKES_TOWER), of_towers(keys)
    if config is None or not own:
        return parameters
    tower, holder = TOWERS[model.family.tower], _holder_of(model, own, where)
    published = tower.shapes(config, model.where)
    made = _of_layers(tower, config, model.where) if _has_layers(holder) else _of_modules(holder, published)
    return replace(
        parameters, shapes=parameters.shapes | published, parameters=[*parameters.parameters, *made]
    )


def with_tower_shapes(parameters: ModelParameters, model: Model) -> ModelParameters:
    """Return the parameters of a language model with the published tensors of the tower that `model` takes among their
    shapes, wherever these lie."""
    shapes = TOWERS[model.family.tower].shapes(model.config[TAKES_TOWER], model.where)
    return replace(parameters, shapes=parameters.shapes | shapes)


def has_layers(model: Model, keys: Iterable[str]) -> bool:
    """Return True if the tower among these keys, as `model` takes it, is made of Megatron's layers."""
    own = of_towers(keys)
    return bool(own) and _has_layers(_holder_of(model, own, model.where))


def _has_layers(holder: TowerHolder) -> bool:
    return not holder.names[0][1]


def _holder_of(model: Model, keys: Collection[str], where: object) -> TowerHolder:
    layers = any(block.megatron for block in TOWERS[model.family.tower].blocks)
    for holder in HOLDERS:
        fitting = [
            own for own, name in holder.names if (name.startswith(model.family.towers) if name else layers)
        ]
        if any(key.startswith(own) for own in fitting for key in keys):
            return holder
    larger = model.family.wrapped_in[0]
    raise ReshardError(
        f"{where} holds {len(keys)} parameters that no tower of {larger} has: {listed(sorted(keys))}"
    )


def _of_modules(holder: TowerHolder, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Parameter]:
    """Yield the parameters of transformers' own modules: each a published tensor."""
    for name, shape in shapes.items():
        for own, published in holder.names:
            if name.startswith(published):
                parts = (Part(name, whole(shape), (0,) * len(shape)),)
                inner = name.removeprefix(published)
                yield Parameter(own, inner, inner, None, None, False, shape, parts, None)


def _of_layers(tower: Tower, config: Mapping[str, Any], where: str) -> Iterator[Parameter]:
    """Yield the parameters of a tower of Megatron's layers."""
    config = tower.filled(config)
    sizes = tower.sizes_of(config, where)
    if sizes["H"] % sizes[tower.heads]:
        raise ReshardError(f"{where}: the heads of vision_config do not divide its hidden_size")
    for block in tower.blocks:
        count = count_of(block, config)
        for index in range(count):
            for row in block.rows:
                yield _parameter(block, TowerRow(*row), index, count, sizes, sizes[tower.heads])


def _parameter(
    block: TowerBlock, row: TowerRow, index: int, count: int, sizes: Mapping[str, int], heads: int
) -> Parameter:
    shape, name = shape_of(row.shape, sizes), block.published.format(index) + row.name
    split = None if row.split == "-" else (row.split.split()[0], int(row.split.split()[1]))
    local = row.megatron
    for engine, plain in _LOCAL_NAMES.items():
        local = local.replace(engine, plain)
    parts: tuple[Part, ...] = (Part(name, whole(shape), (0,) * len(shape)),)
    if row.arrangement == "qkv":
        parts = tuple(_by_head(name, shape, heads))
    counted = bool(block.counted_by)
    return Parameter(
        block.megatron,
        row.megatron,
        local,
        index if counted else None,
        None,
        False,
        shape,
        parts,
        split,
        layers=count if counted else None,
    )


def _by_head(name: str, shape: tuple[int, ...], heads: int) -> Iterator[Part]:
    """Yield the parts of a tensor with all queries, all keys and all values, as each head has its own in Megatron's."""
    rows, rest = shape[0] // 3, shape[1:]
    height, zeros = rows // heads, (0,) * len(rest)
    for head in range(heads):
        for kind in range(3):
            start, at = kind * rows + head * height, (3 * head + kind) * height
            yield Part(name, Box((start, *zeros), (height, *rest)), (at, *zeros))
