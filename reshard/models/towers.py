"""The towers that lie around a language model: their tensors as published, as tables, and which of them files lack.

A tower is a list of blocks. A block's rows have these columns, as those of `reshard.models.tables` do:

| column             | meaning                                                                                   |
|--------------------|-------------------------------------------------------------------------------------------|
| HF parameter       | its published name, without what those of the block begin with                            |
| shape              | of that tensor, in the tower's sizes                                                      |
| Megatron parameter | its name where the tower is made of Megatron's layers; left out where none is             |
| arrangement        | ``plain``; or ``qkv``: published are all queries, all keys, all values, and in Megatron   |
|                    | each head has its query, key and value                                                    |
| split              | ``tp 0``: axis tp splits dim 0; ``-``: every rank has all of it                           |

A trainer that has transformers' own module has the published names, each tensor whole on every rank.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError
from reshard.models.config_fields import whole_number
from reshard.models.tables import shape_of

# In a model's config: that of the larger model around it, where its tower belongs to what is read, saved or refitted. A
# pipeline stage of an engine posts None where its loader takes nothing of the tower, and False where none of its parts
# can be refitted (`one_config` makes one of what all stages post).
TAKES_TOWER = "_takes_tower"


class TowerRow(NamedTuple):
    """One line of a tower's table; the module docstring explains the fields."""

    name: str
    shape: str
    megatron: str = ""
    arrangement: str = "plain"
    split: str = "-"


class TowerBlock(NamedTuple):
    """Rows whose names begin alike: with `published`, or with `megatron` where the tower is made of Megatron's layers.

    `counted_by` is the field of ``vision_config`` that says how many there are (a number, or a list of which each entry
    is one); ``{}`` in `published` is the count. It is empty for what is there once.
    """

    published: str
    megatron: str
    counted_by: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Tower:
    """A tower: its blocks, and its `sizes` by the letters of their shapes, each a field of ``vision_config`` and what
    that is where it is absent (None: it is needed). Of a list of numbers the size is the product.

    `heads` is the letter of the number of attention heads. `megatron` has the fields of ``vision_config`` by those of
    the config of Megatron's layers, `always` what others there are for every tower of this kind. Of other fields of
    ``vision_config``, `absent` says what they are where they are absent, and `as_other` which field they repeat then.

    Where transformers has a class of its own for a model that is published otherwise: `in_class` has, by fields of the
    published ``vision_config``, where that class's config has them (with dots), `of_class` what the published code
    computes by fields that only that class has, and `saved_as` what that class's names in files begin with, by what
    those of the published ones do.
    """

    sizes: Mapping[str, tuple[str, int | None]]
    heads: str
    blocks: tuple[TowerBlock, ...]
    megatron: Mapping[str, str]
    always: Mapping[str, Any]
    absent: Mapping[str, Any]
    as_other: Mapping[str, str]
    in_class: Mapping[str, str] = field(default_factory=dict)
    of_class: Mapping[str, Any] = field(default_factory=dict)
    saved_as: Mapping[str, str] = field(default_factory=dict)

    def as_published(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole config of transformers' own class, with all its fields, in the published ones. Nothing else
        of its ``vision_config`` is kept: that class does not read it, and computes what its absence means."""
        values = {name: _at(config, path) for name, path in self.in_class.items()}
        vision = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
        own = vision_of(config)
        vision |= {name: own[name] for name, value in self.of_class.items() if own.get(name, value) != value}
        return {**self.without_class_fields(config), "vision_config": vision}

    def without_class_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole config without fields that transformers' own class alone reads."""
        alone = {*self.in_class.values()} - {
            f"vision_config.{name}" for name in (*self.in_class, *self.as_other)
        }
        vision = {n: value for n, value in vision_of(config).items() if f"vision_config.{n}" not in alone}
        outer = {name: value for name, value in config.items() if name not in alone}
        return outer | ({"vision_config": vision} if "vision_config" in config else {})

    def published_name(self, saved: str) -> str:
        """Return the published name of a tensor that transformers' own class saves under this one."""
        for published, prefix in self.saved_as.items():
            if saved.startswith(prefix):
                return published + saved.removeprefix(prefix)
        return saved

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole ``config.json`` with what the absent fields of its ``vision_config`` stand for."""
        sizes = {name: default for name, default in self.sizes.values() if default is not None}
        vision = {**sizes, **self.absent, **vision_of(config)}
        for name, other in self.as_other.items():
            if vision.get(name) is None and other in vision:
                vision[name] = vision[other]
        return {**config, "vision_config": vision}

    def sizes_of(self, config: Mapping[str, Any], where: str) -> dict[str, int]:
        """Return the letters of the tower's shapes with the sizes of a whole ``config.json``. Raises ReshardError for
        one that it lacks."""
        vision, sizes = vision_of(config), {}
        for letter, (name, default) in self.sizes.items():
            value = vision.get(name, default)
            numbers = value if isinstance(value, list) else [value]
            if not numbers or not all(whole_number(number, 1) for number in numbers):
                raise ReshardError(
                    f"{where}: vision_config.{name} is {value!r:.80}, not the size of a tower's tensors"
                )
            sizes[letter] = prod(numbers)
        return sizes

    def shapes(self, config: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tower's tensors by a whole ``config.json``, by their published names, in the order
        of these, as files have them."""
        config = self.filled(config)
        sizes = self.sizes_of(config, where)
        shapes = {
            prefix + row.name: shape_of(row.shape, sizes)
            for block in self.blocks
            for prefix, row in named(block, config)
        }
        return dict(sorted(shapes.items()))


def vision_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a whole ``config.json`` says of the tower."""
    vision = config.get("vision_config")
    return vision if isinstance(vision, Mapping) else {}


def _at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field of a config, or of one inside it; None if it is not there."""
    first, _, rest = path.partition(".")
    value = config.get(first)
    return _at(value, rest) if rest and isinstance(value, Mapping) else None if rest else value


def count_of(block: TowerBlock, config: Mapping[str, Any]) -> int:
    """Return how many blocks of this kind a whole ``config.json`` announces."""
    if not block.counted_by:
        return 1
    value = vision_of(config).get(block.counted_by)
    return len(value) if isinstance(value, list) else value if isinstance(value, int) else 0


def named(block: TowerBlock, config: Mapping[str, Any]) -> Iterator[tuple[str, TowerRow]]:
    """Yield the rows of all blocks of this kind, each with what its published name begins with."""
    for index in range(count_of(block, config)):
        for row in block.rows:
            yield block.published.format(index), TowerRow(*row)


_MERGER = (
    ("linear_fc1.weight", "M*M*H M*M*H", "linear_fc1.weight", "plain", "tp 0"),
    ("linear_fc1.bias",   "M*M*H",       "linear_fc1.bias",   "plain", "tp 0"),
    ("linear_fc2.weight", "O M*M*H",     "linear_fc2.weight", "plain", "tp 1"),
    ("linear_fc2.bias",   "O",           "linear_fc2.bias",   "plain", "-"),
)  # fmt: skip
_VISUAL = (
    TowerBlock("model.visual.", "vision_model.", "", (
        ("patch_embed.proj.weight", "H C T P P", "patch_embed.proj.weight"),
        ("patch_embed.proj.bias",   "H",         "patch_embed.proj.bias"),
        ("pos_embed.weight",        "N H",       "pos_embed.weight"),
    )),
    TowerBlock("model.visual.blocks.{}.", "vision_model.decoder.layers.", "depth", (
        ("norm1.weight",          "H",     "self_attention.linear_qkv.layer_norm_weight"),
        ("norm1.bias",            "H",     "self_attention.linear_qkv.layer_norm_bias"),
        ("norm2.weight",          "H",     "mlp.linear_fc1.layer_norm_weight"),
        ("norm2.bias",            "H",     "mlp.linear_fc1.layer_norm_bias"),
        ("attn.qkv.weight",       "3*H H", "self_attention.linear_qkv.weight",  "qkv",   "tp 0"),
        ("attn.qkv.bias",         "3*H",   "self_attention.linear_qkv.bias",    "qkv",   "tp 0"),
        ("attn.proj.weight",      "H H",   "self_attention.linear_proj.weight", "plain", "tp 1"),
        ("attn.proj.bias",        "H",     "self_attention.linear_proj.bias"),
        ("mlp.linear_fc1.weight", "F H",   "mlp.linear_fc1.weight",             "plain", "tp 0"),
        ("mlp.linear_fc1.bias",   "F",     "mlp.linear_fc1.bias",               "plain", "tp 0"),
        ("mlp.linear_fc2.weight", "H F",   "mlp.linear_fc2.weight",             "plain", "tp 1"),
        ("mlp.linear_fc2.bias",   "H",     "mlp.linear_fc2.bias"),
    )),
    TowerBlock("model.visual.merger.", "vision_model.merger.", "", (
        ("norm.weight", "H", "patch_norm.weight"),
        ("norm.bias",   "H", "patch_norm.bias"),
        *_MERGER,
    )),
)  # fmt: skip
_MERGERS = TowerBlock(
    "model.visual.deepstack_merger_list.{}.",
    "vision_model.decoder.deepstack_merger_list.",
    "deepstack_visual_indexes",
    (("norm.weight", "M*M*H", "patch_norm.weight"), ("norm.bias", "M*M*H", "patch_norm.bias"), *_MERGER),
)
_SIZES = {
    "H": ("hidden_size", None), "F": ("intermediate_size", None), "NQ": ("num_heads", None), "C": ("in_channels", 3),
    "T": ("temporal_patch_size", 2), "P": ("patch_size", None), "N": ("num_position_embeddings", None),
    "M": ("spatial_merge_size", 2), "O": ("out_hidden_size", None),
}  # fmt: skip
_OF_LAYERS = {
    "num_layers": "depth", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_heads", "num_query_groups": "num_heads", "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size", "in_channels": "in_channels",
    "spatial_merge_size": "spatial_merge_size", "num_position_embeddings": "num_position_embeddings",
    "out_hidden_size": "out_hidden_size",
}  # fmt: skip
_ALWAYS = {
    "normalization": "LayerNorm", "layernorm_epsilon": 1e-6, "layernorm_zero_centered_gamma": False,
    "add_bias_linear": True, "gated_linear_unit": False, "qk_layernorm": False, "num_moe_experts": None,
}  # fmt: skip
_TANH = {"hidden_act": "gelu_pytorch_tanh"}
VISUAL = Tower(_SIZES, "NQ", _VISUAL, _OF_LAYERS, _ALWAYS, _TANH | {"deepstack_visual_indexes": []}, {})
DEEPSTACK = Tower(
    _SIZES,
    "NQ",
    (*_VISUAL, _MERGERS),
    _OF_LAYERS | {"deepstack_visual_indexes": "deepstack_visual_indexes"},
    _ALWAYS,
    _TANH,
    {},
)
WINDOWED = Tower(
    {
        "H": ("hidden_size", None), "F": ("intermediate_size", None), "C": ("in_channels", 3),
        "T": ("temporal_patch_size", 2), "P": ("patch_size", 14), "M": ("spatial_merge_size", 2),
        "O": ("out_hidden_size", None),
    },
    "",
    (
        TowerBlock("visual.", "", "", (("patch_embed.proj.weight", "H C T P P"),)),
        TowerBlock("visual.blocks.{}.", "", "depth", (
            ("norm1.weight", "H"), ("norm2.weight", "H"),
            ("attn.qkv.weight", "3*H H"), ("attn.qkv.bias", "3*H"),
            ("attn.proj.weight", "H H"), ("attn.proj.bias", "H"),
            ("mlp.gate_proj.weight", "F H"), ("mlp.gate_proj.bias", "F"),
            ("mlp.up_proj.weight", "F H"), ("mlp.up_proj.bias", "F"),
            ("mlp.down_proj.weight", "H F"), ("mlp.down_proj.bias", "H"),
        )),
        TowerBlock("visual.merger.", "", "", (
            ("ln_q.weight", "H"), ("mlp.0.weight", "M*M*H M*M*H"), ("mlp.0.bias", "M*M*H"),
            ("mlp.2.weight", "O M*M*H"), ("mlp.2.bias", "O"),
        )),
    ),
    {},
    {},
    {
        "depth": 32, "num_heads": 16, "hidden_act": "silu", "window_size": 112, "tokens_per_second": 4,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    # Which published configs have beside those that the class reads.
    {"in_chans": "in_channels", "spatial_patch_size": "patch_size"},
)  # fmt: skip
MOONVIT = Tower(
    {
        "H": ("vt_hidden_size", None), "F": ("vt_intermediate_size", None), "P": ("patch_size", 14),
        "Y": ("init_pos_emb_height", 64), "X": ("init_pos_emb_width", 64), "M": ("merge_kernel_size", 4),
        "MH": ("mm_hidden_size", None), "O": ("text_hidden_size", None),
    },
    "",
    (
        TowerBlock("vision_tower.", "", "", (
            ("patch_embed.proj.weight", "H 3 P P"), ("patch_embed.proj.bias", "H"),
            ("patch_embed.pos_emb.weight", "Y X H"),
            ("encoder.final_layernorm.weight", "H"), ("encoder.final_layernorm.bias", "H"),
        )),
        TowerBlock("vision_tower.encoder.blocks.{}.", "", "vt_num_hidden_layers", (
            ("norm0.weight", "H"), ("norm0.bias", "H"), ("norm1.weight", "H"), ("norm1.bias", "H"),
            ("wqkv.weight", "3*H H"), ("wqkv.bias", "3*H"), ("wo.weight", "H H"), ("wo.bias", "H"),
            ("mlp.fc0.weight", "F H"), ("mlp.fc0.bias", "F"), ("mlp.fc1.weight", "H F"), ("mlp.fc1.bias", "H"),
        )),
        TowerBlock("mm_projector.", "", "", (
            ("pre_norm.weight", "MH"), ("pre_norm.bias", "MH"),
            ("proj.0.weight", "M*MH M*MH"), ("proj.0.bias", "M*MH"), ("proj.2.weight", "O M*MH"), ("proj.2.bias", "O"),
        )),
    ),
    {},
    {},
    {
        "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27, "vt_hidden_size": 1152, "vt_intermediate_size": 4304,
        "merge_kernel_size": [2, 2], "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
    },
    {
        "mm_hidden_size": "vt_hidden_size", "hidden_size": "vt_hidden_size",
        "intermediate_size": "vt_intermediate_size", "num_attention_heads": "vt_num_attention_heads",
        "num_hidden_layers": "vt_num_hidden_layers",
    },
    {
        "vt_hidden_size": "vision_config.hidden_size", "vt_intermediate_size": "vision_config.intermediate_size",
        "vt_num_attention_heads": "vision_config.num_attention_heads",
        "vt_num_hidden_layers": "vision_config.num_hidden_layers", "patch_size": "vision_config.patch_size",
        "merge_kernel_size": "vision_config.merge_kernel_size", "init_pos_emb_height": "vision_config.pos_emb_height",
        "init_pos_emb_width": "vision_config.pos_emb_width", "init_pos_emb_time": "vision_config.pos_emb_time",
        "text_hidden_size": "text_config.hidden_size", "mm_hidden_size": "projection_hidden_size",
        "projector_ln_eps": "projection_layer_norm_eps",
    },
    {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
    {"vision_tower.patch_embed.": "vision_tower.encoder.patch_embed.", "mm_projector.": "model.mm_projector."},
)  # fmt: skip

# By the name that families have for them.
TOWERS = {"visual": VISUAL, "deepstack": DEEPSTACK, "windowed": WINDOWED, "moonvit": MOONVIT}


def lacking_of_tower(tower: str, config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the tensors of one of `TOWERS` that ``config.json`` announces, and that are not among these names.

    None are known to be missing where all have other names than published ones, as some programs write them.
    """
    blocks = TOWERS[tower].blocks if tower else ()
    config = TOWERS[tower].filled(config) if tower else config
    expected = [prefix + row.name for block in blocks for prefix, row in named(block, config)]
    lacking = [name for name in expected if name not in names]
    return [] if names and len(lacking) == len(expected) else lacking
