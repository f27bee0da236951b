"""The tensors of the towers that lie around a language model, as published, and which of them files lack.

A tower is a tuple of rows: the module's name, the field of ``vision_config`` that counts modules of this kind
(a number, or a list of which each entry is one), and the module's tensors. ``{}`` in a name is the count.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

TowerModule = tuple[str, str, str]

VISUAL: tuple[TowerModule, ...] = (
    ("model.visual.patch_embed.proj",     "",      "weight bias"),
    ("model.visual.pos_embed",            "",      "weight"),
    ("model.visual.blocks.{}.norm1",      "depth", "weight bias"),
    ("model.visual.blocks.{}.norm2",      "depth", "weight bias"),
    ("model.visual.blocks.{}.attn.qkv",   "depth", "weight bias"),
    ("model.visual.blocks.{}.attn.proj",  "depth", "weight bias"),
    ("model.visual.blocks.{}.mlp.linear_fc1", "depth", "weight bias"),
    ("model.visual.blocks.{}.mlp.linear_fc2", "depth", "weight bias"),
    ("model.visual.merger.norm",          "",      "weight bias"),
    ("model.visual.merger.linear_fc1",    "",      "weight bias"),
    ("model.visual.merger.linear_fc2",    "",      "weight bias"),
)  # fmt: skip
DEEPSTACK: tuple[TowerModule, ...] = (
    *VISUAL,
    ("model.visual.deepstack_merger_list.{}.norm",       "deepstack_visual_indexes", "weight bias"),
    ("model.visual.deepstack_merger_list.{}.linear_fc1", "deepstack_visual_indexes", "weight bias"),
    ("model.visual.deepstack_merger_list.{}.linear_fc2", "deepstack_visual_indexes", "weight bias"),
)  # fmt: skip
MOONVIT: tuple[TowerModule, ...] = (
    ("vision_tower.patch_embed.proj",           "",                     "weight bias"),
    ("vision_tower.patch_embed.pos_emb",        "",                     "weight"),
    ("vision_tower.encoder.blocks.{}.norm0",    "vt_num_hidden_layers", "weight bias"),
    ("vision_tower.encoder.blocks.{}.norm1",    "vt_num_hidden_layers", "weight bias"),
    ("vision_tower.encoder.blocks.{}.wqkv",     "vt_num_hidden_layers", "weight bias"),
    ("vision_tower.encoder.blocks.{}.wo",       "vt_num_hidden_layers", "weight bias"),
    ("vision_tower.encoder.blocks.{}.mlp.fc0",  "vt_num_hidden_layers", "weight bias"),
    ("vision_tower.encoder.blocks.{}.mlp.fc1",  "vt_num_hidden_layers", "weight bias"),
    ("vision_tower.encoder.final_layernorm",    "",                     "weight bias"),
    ("mm_projector.pre_norm",                   "",                     "weight bias"),
    ("mm_projector.proj.0",                     "",                     "weight bias"),
    ("mm_projector.proj.2",                     "",                     "weight bias"),
)  # fmt: skip


# By the name that families have for them.
TOWERS = {"": (), "visual": VISUAL, "deepstack": DEEPSTACK, "moonvit": MOONVIT}


def lacking_of_tower(tower: str, config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the tensors of one of `TOWERS` that ``config.json`` announces, and that are not among these names.

    None are known to be missing where all have other names than published ones, as some programs write them.
    """
    vision = config.get("vision_config")
    expected = list(_tensors(TOWERS[tower], vision if isinstance(vision, Mapping) else {}))
    lacking = [name for name in expected if name not in names]
    return [] if names and len(lacking) == len(expected) else lacking


def _tensors(modules: Collection[TowerModule], vision: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors that these modules have by a ``vision_config``."""
    for module, counted_by, tensors in modules:
        value = vision.get(counted_by)
        count = len(value) if isinstance(value, list) else value if isinstance(value, int) else 0
        for index in range(count) if counted_by else (0,):
            for tensor in tensors.split():
                yield f"{module.format(index)}.{tensor}"
