"""Megatron's arguments that decide what a model computes, and the comparison of two sets of them.

`NUMERICS_ARGS` names them all, with Megatron's defaults; everything else in its parser is about
speed, memory, training or files. A test holds each argument of the installed Megatron, and each
field of its configs, against this table.
"""

import math
from collections.abc import Mapping
from ctypes import c_float
from typing import Any

# An argument that Megatron derives where it is not given.
DERIVED = object()

NUMERICS_ARGS: dict[str, Any] = {
    # sizes
    "num_layers": DERIVED, "hidden_size": DERIVED, "ffn_hidden_size": DERIVED, "num_attention_heads": DERIVED,
    "num_query_groups": DERIVED, "kv_channels": DERIVED,
    # norms, biases, activation
    "normalization": "LayerNorm", "layernorm_epsilon": 1e-05, "layernorm_zero_centered_gamma": False,
    "apply_layernorm_1p": False, "apply_residual_connection_post_layernorm": False, "add_bias_linear": True,
    "add_qkv_bias": False, "swiglu": False, "squared_relu": False, "quick_geglu": False, "openai_gelu": False,
    "glu_linear_offset": 0.0, "activation_func_clamp_value": None, "untie_embeddings_and_output_weights": False,
    # attention
    "qk_layernorm": False, "qk_l2_norm": False, "attention_output_gate": False, "softmax_type": "vanilla",
    "softmax_scale": None, "window_size": None, "window_attn_skip_freq": None, "multi_latent_attention": False,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "experimental_attention_variant": None, "linear_attention_freq": None, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mamba_num_heads": None, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128,
    # an indexer's choice of tokens; its Hadamard rotation leaves the scores as they are
    "dsa_indexer_n_heads": None, "dsa_indexer_head_dim": None, "dsa_indexer_topk": None, "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0, "dsa_indexer_rope_interleaved": False, "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": None,
    # positions
    "position_embedding_type": "learned_absolute", "rotary_base": 10000, "rotary_percent": 1.0,
    "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False,
    "rope_scaling_factor": 8.0, "no_rope_freq": None, "mrope_section": None, "rope_type": None,
    "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1, "yarn_original_max_position_embeddings": None, "yarn_beta_fast": None,
    "yarn_beta_slow": None, "yarn_correction_range_round_to_int": None,
    # experts
    "num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": DERIVED, "moe_router_topk": 2,
    "moe_router_pre_softmax": False, "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "aux_loss", "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None, "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False,
    "moe_expert_capacity_factor": None, "moe_expert_rank_capacity_factor": None,
    "moe_router_topk_limited_devices": None, "moe_token_dropping": False, "moe_apply_probs_on_input": False,
    "moe_latent_size": None, "moe_mlp_glu_interleave_size": None, "moe_shared_expert_glu_interleave_size": None,
    # other models altogether
    "use_mup": False, "is_hybrid_model": False, "heterogeneous_block_specs": False, "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None, "spec": None,
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
}  # fmt: skip

# What Megatron-LM called them before 0.16.
_FORMERLY = {"norm_epsilon": "layernorm_epsilon"}
# Two spellings of "not there".
_SAME_AS_NONE: dict[str, tuple] = {
    "num_experts": (0,), "moe_shared_expert_intermediate_size": (0,), "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_num_groups": (1,), "moe_router_group_topk": (1,), "window_size": ((-1, -1), (-1, 0)),
    "rotary_seq_len_interpolation_factor": (1,), "experimental_attention_variant": ("",),
}  # fmt: skip
# Balancing by a loss, which changes gradients only; the others choose experts.
_BY_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
        "original_max_position_embeddings", "beta_fast", "beta_slow")  # fmt: skip
_NOT_MLA = ("kv_channels", "num_query_groups", "use_rope_scaling", "rotary_seq_len_interpolation_factor")
# Read where the variant of attention is a linear one.
_LINEAR = ("linear_attention_freq", "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
           "linear_value_head_dim", "linear_conv_kernel_dim")  # fmt: skip
_YARN = ("rotary_scaling_factor", "mscale", "mscale_all_dim")


def disagreements(args: Mapping[str, Any], expected: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, value, expected value) for each argument that makes another model than `expected`.

    An argument that `expected` lacks is at Megatron's default; one that `args` lacks is not compared.
    """
    a, b = (
        _settled(args),
        _settled({k: v for k, v in NUMERICS_ARGS.items() if v is not DERIVED} | dict(expected)),
    )
    skipped = _without_effect(b)
    different = []
    for name, default in NUMERICS_ARGS.items():
        absent = name not in a or (a[name] is None and default is not None)
        if absent or name in skipped or (default is DERIVED and name not in b):
            continue
        if not same_value(a[name], b[name]):
            different.append((name, args.get(name, a[name]), b[name]))
    return different


def as_named_now(args: Mapping[str, Any]) -> dict[str, Any]:
    """Rename arguments of an older Megatron-LM, and add those that followed from others then. A value that
    a newer one spells otherwise has the older spelling."""
    former = {now: args[name] for name, now in _FORMERLY.items() if name in args}
    # Before 0.14, which brought rope_type.
    if args.get("multi_latent_attention") and "rope_type" not in args and args.get("max_position_embeddings"):
        former["original_max_position_embeddings"] = args["max_position_embeddings"]
    named = former | {name: value for name, value in args.items() if name not in _FORMERLY}
    if named.get("experimental_attention_variant") == "gdn":  # from 0.20 on
        named["experimental_attention_variant"] = "gated_delta_net"
    if named.get("num_experts") and named.get("moe_ffn_hidden_size") is None and "ffn_hidden_size" in named:
        named["moe_ffn_hidden_size"] = named["ffn_hidden_size"]
    return named


def _settled(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with one spelling for each setting that has several."""
    values = as_named_now(args)
    if values.get("add_bias_linear"):
        values["add_qkv_bias"] = True
    if values.get("group_query_attention") is False:
        values["num_query_groups"] = values.get("num_attention_heads")
    for name, spellings in _SAME_AS_NONE.items():
        value = values.get(name)
        if (tuple(value) if isinstance(value, list) else value) in spellings:
            values[name] = None
    if values.get("moe_layer_freq") is not None and values.get("num_layers"):
        values["moe_layer_freq"] = moe_pattern(values["moe_layer_freq"], int(values["num_layers"]))
    if values.get("linear_attention_freq") is not None and values.get("num_layers"):
        frequency, layers = values["linear_attention_freq"], int(values["num_layers"])
        values["linear_attention_freq"] = linear_pattern(frequency, layers)
    if "window_attn_skip_freq" in values and values.get("num_layers"):
        windows = window_pattern(values["window_attn_skip_freq"], int(values["num_layers"]))
        if "window_size" in values and not any(windows):
            values["window_size"] = None
        says_nothing = all(windows) or ("window_size" in values and not values["window_size"])
        values["window_attn_skip_freq"] = None if says_nothing else windows
    balancing = values.get("moe_router_load_balancing_type")
    if balancing is not None and all(
        kind in _BY_LOSS for kind in (balancing if isinstance(balancing, list) else [balancing])
    ):
        values["moe_router_load_balancing_type"] = "aux_loss"
    if values.get("experimental_attention_variant") == "dsa":
        if values.get("dsa_indexer_k_norm_epsilon") is None:
            values["dsa_indexer_k_norm_epsilon"] = values.get("layernorm_epsilon")
        if values.get("num_layers"):
            values["dsa_indexer_topk_freq"] = indexer_pattern(
                int(values.get("dsa_indexer_topk_freq") or 1),
                int(values.get("dsa_indexer_skip_topk_offset") or 0),
                int(values["num_layers"]),
            )
            values["dsa_indexer_skip_topk_offset"] = 0  # it is in the pattern
    if values.get("multi_latent_attention") and "rotary_scaling_factor" in values:
        # YaRN is what Megatron takes where nothing is said; at a factor of 1 it is none.
        plain = values.get("rope_type") == "rope" or values["rotary_scaling_factor"] == 1
        values["rope_type"] = "rope" if plain else "yarn"
    return values


def _without_effect(args: Mapping[str, Any]) -> set[str]:
    """Return the arguments that this model does not read."""
    mla, skipped = bool(args.get("multi_latent_attention")), set()
    if not args.get("num_experts"):
        skipped |= {name for name in NUMERICS_ARGS if name.startswith("moe_")}
    elif isinstance(args.get("moe_layer_freq"), list) and all(args["moe_layer_freq"]):
        skipped.add("ffn_hidden_size")  # of dense layers, of which there are none
    if args.get("moe_router_score_function") == "sigmoid":
        skipped.add("moe_router_pre_softmax")  # there is no softmax
    if args.get("spec"):
        skipped.add("spec")  # of layers whose weights have shapes of their own
    skipped |= set(_NOT_MLA if mla else _MLA)
    pattern = args.get("hybrid_layer_pattern") or ""
    skipped |= {name for name in NUMERICS_ARGS if name.startswith("mamba_") and "M" not in pattern}
    if pattern:
        skipped |= {"moe_layer_freq", *(() if "-" in pattern else ("ffn_hidden_size",))}
    if args.get("position_embedding_type") == "none":
        skipped |= {name for name in NUMERICS_ARGS if name.startswith("rotary_")}
    if args.get("experimental_attention_variant") != "gated_delta_net":
        skipped |= set(_LINEAR) - {"linear_attention_freq"}
    if args.get("experimental_attention_variant") != "dsa":
        skipped |= {name for name in NUMERICS_ARGS if name.startswith("dsa_")}
    if not (args.get("rope_type") == "yarn" if mla else args.get("position_embedding_type") == "yarn"):
        skipped |= {*_YARN, *(name for name in NUMERICS_ARGS if name.startswith("yarn_"))}
        skipped |= {"original_max_position_embeddings", "beta_fast", "beta_slow"}
    if not args.get("use_rope_scaling"):
        skipped.add("rope_scaling_factor")
    return skipped


def linear_pattern(frequency: Any, layers: int) -> list[int]:
    """Return ``--linear-attention-freq`` as a 1 for each layer with linear attention and a 0 for
    each without: of a number n every n-th is without.

    Raises ValueError if it says nothing about so many layers.
    """
    if isinstance(frequency, int) and frequency > 0:
        return [int((layer + 1) % frequency != 0) for layer in range(layers)]
    return _pattern("linear_attention_freq", frequency, layers)


def window_pattern(frequency: Any, layers: int) -> list[int]:
    """Return ``--window-attn-skip-freq`` as a 1 for each layer that attends to a window and a 0 for each that
    attends to all: of a number n every n-th does, without one none.

    Raises ValueError if it says nothing about so many layers.
    """
    return [1] * layers if frequency is None else linear_pattern(frequency, layers)


def moe_pattern(frequency: Any, layers: int) -> list[int]:
    """Return ``--moe-layer-freq`` as a 1 for each layer with experts and a 0 for each without.

    Raises ValueError if it says nothing about so many layers.
    """
    if isinstance(frequency, int):
        return [int(i % frequency == 0) for i in range(layers)]
    return _pattern("moe_layer_freq", frequency, layers)


def _pattern(name: str, entries: Any, layers: int) -> list[int]:
    if isinstance(entries, str):
        entries = [int(n) for n in entries.strip("[]").split(",")]
    if len(entries) != layers:
        raise ValueError(f"{name} has {len(entries)} entries for {layers} layers")
    return [int(entry) for entry in entries]


def indexer_pattern(frequency: int, offset: int, layers: int) -> list[int]:
    """Return ``--dsa-indexer-topk-freq`` and ``--dsa-indexer-skip-topk-offset`` as a 1 for each
    layer with an indexer and a 0 for each that takes the tokens of the last one before it.

    >>> indexer_pattern(4, 2, 8)
    [1, 1, 0, 0, 0, 1, 0, 0]
    """
    return [int(max(layer + 1 - max(offset, 1), 0) % frequency == 0) for layer in range(layers)]


def same_value(a: Any, b: Any) -> bool:
    """Return True if two settings make the same model. Amounts are compared as the float32 that
    they are in a kernel: what has been saved as one, or computed, is the same setting.

    >>> same_value(1e-05, 9.999999747378752e-06), same_value(1000000, 1e6), same_value(32, 33)
    (True, True, False)
    """
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    if numbers and (isinstance(a, float) or isinstance(b, float)):
        return math.isclose(a, b, rel_tol=1e-9) or c_float(a).value == c_float(b).value
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool((list(a) if isinstance(a, tuple) else a) == (list(b) if isinstance(b, tuple) else b))
