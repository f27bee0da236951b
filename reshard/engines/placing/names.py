"""The names that an engine has for a model's parameters, and which of them it fuses: the form in
which an engine's package says so, and what is looked up in it.

Rows of a mapping table that have one name in the engine fill that parameter together, in table
order. A name that the engine's table does not have is the published one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from reshard.core.views import tensor_of
from reshard.models.model import Model
from reshard.models.tables import Row, words_of

# Published name, the engine's parameter, when (as in `reshard.models.tables`); `*` is the rest of
# the name: weight or bias.
NameRow = tuple[str, str, str]
# What all engines here fuse alike.
FUSED: tuple[NameRow, ...] = (
    ("self_attn.q_proj.*",             "self_attn.qkv_proj.*",              "always"),
    ("self_attn.k_proj.*",             "self_attn.qkv_proj.*",              "always"),
    ("self_attn.v_proj.*",             "self_attn.qkv_proj.*",              "always"),
    ("mlp.gate_proj.*",                "mlp.gate_up_proj.*",                "always"),
    ("mlp.up_proj.*",                  "mlp.gate_up_proj.*",                "always"),
    ("mlp.shared_experts.gate_proj.*", "mlp.shared_experts.gate_up_proj.*", "always"),
    ("mlp.shared_experts.up_proj.*",   "mlp.shared_experts.gate_up_proj.*", "always"),
    ("mlp.shared_expert.gate_proj.*",  "mlp.shared_expert.gate_up_proj.*",  "always"),
    ("mlp.shared_expert.up_proj.*",    "mlp.shared_expert.gate_up_proj.*",  "always"),
    ("linear_attn.in_proj_qkv.*",      "linear_attn.in_proj_qkvz.*",        "always"),
    ("linear_attn.in_proj_z.*",        "linear_attn.in_proj_qkvz.*",        "always"),
    ("linear_attn.in_proj_b.*",        "linear_attn.in_proj_ba.*",          "always"),
    ("linear_attn.in_proj_a.*",        "linear_attn.in_proj_ba.*",          "always"),
)  # fmt: skip
# The parts of a model outside its layers.
OUTER = ("embedding", "norm", "output")


class EngineFamily(NamedTuple):
    """The names that an engine has for a family.

    `names` come before those that the families have in common; brackets at the end say which rows
    of an expert's matrix in the parameter a row is. `prefixes` are what published names begin with,
    and what the engine's begin with instead; the first that fits counts. `on_every_stage` are the
    parts outside the layers (`OUTER`) that are not only at a pipeline's ends. `added_once` are the published names of
    what experts add to their outputs: of the ranks that split an expert the first has it, and the
    others zeros. Of those in `whole` every rank has all, where others of such rows are split.
    `repeats_keys` is False if the engine does not start at a TP size above the number of key
    heads, instead of giving several ranks the same.
    """

    names: tuple[NameRow, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    on_every_stage: tuple[str, ...] = ()
    added_once: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    repeats_keys: bool = True


@dataclass(frozen=True, eq=False)
class EngineNames:
    """The names of an `engine` (its own name, for errors).

    `common` are those that families share, `families` the families that they were checked with; one
    that is not there is placed by the trace of the engine's loader alone. `in_a_larger_one` are the
    prefixes of a language model in a larger one, and of the other parts.
    """

    engine: str
    common: tuple[NameRow, ...]
    families: Mapping[str, EngineFamily]
    in_a_larger_one: tuple[tuple[str, str], ...] = ()

    def is_known(self, model: Model) -> bool:
        """Tell whether the names here were checked with the model's family."""
        return model.family.has_megatron_names and model.family.name in self.families

    def family(self, model: Model) -> EngineFamily:
        """Return the names of the model's family; those of no special one where it is not known."""
        return self.families[model.family.name] if self.is_known(model) else EngineFamily()

    def prefixed(self, model: Model, published: str) -> str:
        """Return a published name, or what several begin with, under the prefix that it has in the
        engine."""
        wrapped = self.in_a_larger_one if model.wrapped else ()
        for prefix, engine_prefix in (*self.family(model).prefixes, *wrapped):
            if published.startswith(prefix):
                return engine_prefix + published.removeprefix(prefix)
        return published

    def tower_prefixes(self, model: Model) -> tuple[str, ...]:
        """Return what the engine's names of the tensors begin with that belong to other parts of the
        model in which this language model is."""
        if not model.wrapped:
            return ()
        return tuple(self.prefixed(model, tower) for tower in model.family.towers)

    def parameter(self, model: Model, row: Row) -> str:
        """Return the parameter that a row is part of, without the layer's prefix. Brackets at its
        end say which rows of an expert's matrix it is, where these take turns with others."""
        tensor = tensor_of(row.hf)
        for when, name in _matching(self, model.family.name, tensor):
            if model.holds(words_of(when)):
                return name
        return tensor


@cache
def _matching(names: EngineNames, family: str, hf: str) -> list[tuple[str, str]]:
    """Return (when, the engine's parameter) of each entry that a published name matches."""
    matches = []
    for pattern, parameter, when in (*names.families.get(family, EngineFamily()).names, *names.common):
        module, star, _ = pattern.partition("*")
        if hf == pattern or (star and hf.startswith(module) and "." not in hf.removeprefix(module)):
            name = parameter.replace("*", hf.removeprefix(module)) if star else parameter
            matches.append((when, name))
    return matches
