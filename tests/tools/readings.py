"""What a config, Megatron's flags and a checkpoint's args say of a model, each read by hand: shares
no code with the mapping tables.

All three are brought to one set of names, so that they can be compared: `of_config` by what
transformers' classes have where a config says nothing, `of_flags` and `of_args` by Megatron's own
names.
"""

from pathlib import Path
from typing import Any

# Field of a config: Megatron's argument.
SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
    "attention_dropout": "attention_dropout",
}
ATTENTION = {"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels"}
LATENT = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim",
          "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim": "v_head_dim"}  # fmt: skip
EXPERTS = {"num_experts_per_tok": "moe_router_topk", "moe_intermediate_size": "moe_ffn_hidden_size"}
GROUPS = {"n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk",
          "routed_scaling_factor": "moe_router_topk_scaling_factor"}  # fmt: skip
FIELDS = {
    "llama": SIZES | ATTENTION,
    "qwen3_moe": SIZES | ATTENTION | EXPERTS | {"num_experts": "num_experts"},
    "deepseek_v3": SIZES | LATENT | EXPERTS | GROUPS | {"n_routed_experts": "num_experts"},
}
# What no flag can say: it must be so.
FIXED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen3_moe": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "deepseek_v3": {"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True, "rope_interleave": True,
                    "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}  # fmt: skip
# What Megatron has where nothing is said.
UNSAID = {
    "num_query_groups": None,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
}


def of_config(config: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The meaning of a config that was made from `before` by changing it; what is strange in it is
    under ``strange``."""
    from transformers import CONFIG_MAPPING

    kind = before["model_type"]
    full = (
        CONFIG_MAPPING[kind]().to_dict()
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False}
        | config
    )
    if kind == "qwen3_moe":
        full["num_experts"] = config.get("num_experts", config.get("num_local_experts"))
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = full["num_attention_heads"]
    if config.get("head_dim") is None and kind != "deepseek_v3":
        full["head_dim"] = full["hidden_size"] // full["num_attention_heads"]
    meaning = {argument: full[field] for field, argument in FIELDS[kind].items()}
    meaning["untied"] = not full["tie_word_embeddings"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    meaning["rotary_base"] = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    scaled = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    meaning["rope_factor"] = rope.get("factor") if scaled else None
    if kind == "qwen3_moe":
        meaning["pre_softmax"] = not full["norm_topk_prob"]
    if kind == "deepseek_v3":
        meaning["shared"] = (full["n_shared_experts"] or 0) * full["moe_intermediate_size"]
        meaning["mtp_num_layers"] = (
            config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
        )
    fixed = {
        name: full.get(name)
        for name, value in FIXED[kind].items()
        if full.get(name) not in (value, None) or full.get(name, 0) is None
    }
    new = {
        name
        for name, value in config.items()
        if name not in before and value is not None and not name.startswith("_")
    }
    nested = (
        rope.keys() - {**(before.get("rope_parameters") or {}), **(before.get("rope_scaling") or {})}.keys()
    )
    meaning["strange"] = sorted(
        {*(f"{name} = {value!r:.40}" for name, value in fixed.items()), *new, *nested}
    )
    other = config.get("model_type") not in (kind, None) and config.get("architectures")
    return meaning | ({"strange": [*meaning["strange"], "model_type"]} if other else {})


def of_flags(path: Path, kind: str) -> dict[str, Any]:
    """The meaning of a file of Megatron's flags."""
    words: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        flag, _, value = line.partition(" ")
        words[flag.removeprefix("--").replace("-", "_")] = value
    values = {
        name: float(text)
        if text.replace(".", "").replace("e", "").replace("-", "").replace("+", "").isdigit()
        else text
        for name, text in words.items()
    }
    return of_args(
        values
        | {
            "untie_embeddings_and_output_weights": "untie_embeddings_and_output_weights" in words,
            "use_rope_scaling": "use_rope_scaling" in words,
            "moe_router_pre_softmax": "moe_router_pre_softmax" in words,
        },
        kind,
    )


def of_args(args: dict[str, Any], kind: str) -> dict[str, Any]:
    """The meaning of Megatron's arguments."""
    args = (
        {"norm_epsilon": 1e-05}
        | dict(args)
        | ({"norm_epsilon": args["layernorm_epsilon"]} if "layernorm_epsilon" in args else {})
    )
    meaning = {}
    for argument in FIELDS[kind].values():
        value = args.get(argument)
        meaning[argument] = UNSAID.get(argument) if value is None else value
    if "num_query_groups" in meaning and (
        meaning["num_query_groups"] is None or args.get("group_query_attention") is False
    ):
        meaning["num_query_groups"] = args["num_attention_heads"]
    meaning["untied"] = bool(args.get("untie_embeddings_and_output_weights"))
    meaning["rotary_base"] = args.get("rotary_base", 10000)
    meaning["rope_factor"] = None
    if kind == "deepseek_v3":
        factor = args.get("rotary_scaling_factor")
        meaning["rope_factor"] = None if factor in (None, 1) else factor
        meaning["shared"] = args.get("moe_shared_expert_intermediate_size") or 0
        meaning["mtp_num_layers"] = args.get("mtp_num_layers") or 0
    elif args.get("use_rope_scaling"):
        meaning["rope_factor"] = args.get("rope_scaling_factor", 8.0)
    elif args.get("rotary_seq_len_interpolation_factor"):
        meaning["rope_factor"] = args["rotary_seq_len_interpolation_factor"]
    elif args.get("position_embedding_type") == "yarn":
        meaning["rope_factor"] = args.get("rotary_scaling_factor")
    if kind == "qwen3_moe":
        meaning["pre_softmax"] = bool(args.get("moe_router_pre_softmax"))
    return meaning | {"strange": []}


def unlike(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Where two meanings differ; numbers by value."""
    return [
        f"{name}: {a.get(name)!r:.60} and {b.get(name)!r:.60}"
        for name in a | b
        if not _same(a.get(name), b.get(name))
    ]


def _same(a: Any, b: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return abs(a - b) <= 1e-9 * abs(b) if numbers else a == b
