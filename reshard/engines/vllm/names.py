"""What vLLM calls the parameters of a layer, and which of them it fuses.

Rows of a table that come to one name fill it together, in table order. What is in no list keeps its published
name.
"""

from functools import cache

from reshard.models.family import Family
from reshard.models.model import Model
from reshard.models.tables import Row

# published name, vLLM's parameter, where; `*` is what is left of the name: weight or bias
NAMES = (
    ("self_attn.q_proj.*",                    "self_attn.qkv_proj.*",                  "always"),
    ("self_attn.k_proj.*",                    "self_attn.qkv_proj.*",                  "always"),
    ("self_attn.v_proj.*",                    "self_attn.qkv_proj.*",                  "always"),
    ("mlp.gate_proj.*",                       "mlp.gate_up_proj.*",                    "always"),
    ("mlp.up_proj.*",                         "mlp.gate_up_proj.*",                    "always"),
    ("mlp.shared_experts.gate_proj.*",        "mlp.shared_experts.gate_up_proj.*",     "always"),
    ("mlp.shared_experts.up_proj.*",          "mlp.shared_experts.gate_up_proj.*",     "always"),
    ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.routed_experts.w13_weight", "always"),
    ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.routed_experts.w13_weight", "always"),
    ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.routed_experts.w2_weight",  "always"),
)  # fmt: skip


def vllm_name(model: Model, row: Row) -> str:
    """The parameter of vLLM that a row is part of, without the layer's prefix. The family's own names come
    before the common ones."""
    for condition, name in _names(model.family, row.hf):
        if condition == "always" or model.holds([condition]):
            return name
    return row.hf


@cache
def _names(family: Family, hf: str) -> list[tuple[str, str]]:
    """(condition, vLLM's parameter) of each entry that a published name matches."""
    found = []
    for pattern, parameter, condition in (*(family.vllm_names or ()), *NAMES):
        module, star, _ = pattern.partition("*")
        if hf == pattern or (star and hf.startswith(module) and "." not in hf.removeprefix(module)):
            found.append((condition, parameter.replace("*", hf.removeprefix(module)) if star else parameter))
    return found
