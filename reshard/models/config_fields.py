"""The fields of a Hugging Face config: those that are mapped, those without effect, and what the rest may be.

A field is *mapped*, where a mapping table or a rule of its family reads it, or has *no effect* on what the
weights compute. Of the others,

- what transformers' config class has and nothing here maps is refused unless it is at the class's *default*;
- what the class does not have cannot change transformers' model. It is a *note*, unless its name decides
  something in another family, in vLLM or in Megatron (`ELSEWHERE`): then it is refused by name unless its value
  is a harmless one.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.models.rope import ROPE_FIELDS

MAX_NAMED = 100  # fields in one sentence
ENVIRONMENT = "RESHARD_IGNORE_CONFIG_FIELDS"

# Read by rules rather than by a table's row.
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
MAPPED = {"architectures", "model_type", "quantization_config", *ROPE_FIELDS}

# Tokens, files, dtypes on disk, names and licenses, what a call returns or how it samples, and what says only
# how to train or in which order to sum.
NO_EFFECT = """
bos_token eos_token pad_token unk_token tokenizer_class tokenizer_model_max_length tokenizer_padding_side padding_side prefix
model_max_length max_sequence_length max_seq_len max_seq_length seq_length torch_dtype dtype use_bfloat16 is_decoder
attention_softmax_in_fp32 auto_map unsloth_fixed task_specific_params finetuning_task transformers.js_config is_llama_config
license license_name license_link name model_name base_model language tags use_cache output_hidden_states output_attentions
output_router_logits output_scores return_dict return_dict_in_generate id2label label2id num_labels problem_type
chunk_size_feed_forward tf_legacy_loss loss_type torchscript attn_implementation attention_implementation use_flash_attention_2
use_flash_attn pretraining_dataset pretraining_tp gradient_checkpointing neftune_noise_alpha initializer_factor hidden_dropout
resid_pdrop embd_pdrop residual_dropout classifier_dropout router_aux_loss_coef aux_loss_alpha seq_aux router_z_loss_coef
router_jitter_noise ep_size max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
""".split()
# The same of every name with such an end: ids of tokens, versions of what has written a config.
NO_EFFECT_ENDS = ("_token_id", "_token_ids", "_version")

# Fields that none of transformers' classes for the families here have, or not all of them, and that decide what
# is computed in another family, in vLLM or in Megatron; with the values at which they decide nothing. Null is one
# of them always, and a list is harmless where all in it are. What a family always has stands in its file
# (`Family.always`).
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    # what kind of model it is
    "is_encoder_decoder": (False,), "add_cross_attention": (False,), "cross_attention_hidden_size": (), "tie_encoder_decoder": (False,),
    "pruned_heads": ({},), "is_causal": (True,), "use_bidirectional_attention": (False,), "block_configs": (), "text_config": (),
    "vision_config": (), "audio_config": (), "per_layer_config": (), "quantization": (), "compression_config": (),
    # positions
    "rope_interleaved": (False,), "rope_interleave": (False,), "rope_traditional": (False,), "use_rope": (True,),
    "use_dynamic_ntk": (False,), "use_logn_attn": (False,), "use_mrope": (False,), "mrope_section": (), "mrope_interleaved": (False,),
    "xdrope_section": (), "rotary_dim": (), "rotary_pct": (1,), "rotary_percent": (1,), "no_rope_layers": (1,),
    "no_rope_layer_interval": (), "nope_layer_interval": (), "rope_local_base_freq": (), "local_rope_theta": (), "global_rope_theta": (),
    "alibi": (False,), "use_alibi": (False,), "position_embedding_type": ("rope", "rotary"), "learned_pos_emb": (False,),
    "llama_4_scaling": (), "dual_chunk_attention_config": (),
    # attention
    "attention_bias": (False,), "qkv_bias": (False,), "use_qkv_bias": (False,), "attention_out_bias": (False,), "o_bias": (False,),
    "bias": (False,), "use_bias": (False,), "no_bias": (True,), "mlp_bias": (False,), "lm_head_bias": (False,), "use_qk_norm": (False,),
    "qk_norm": (False,), "qk_layernorm": (False,), "use_qk_layernorm": (False,), "query_key_norm": (False,), "attention_multiplier": (),
    "attn_scale": (), "softmax_scale": (), "query_pre_attn_scalar": (), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "attn_temperature_tuning": (False,), "floor_scale": (), "attn_logit_softcapping": (),
    "final_logit_softcapping": (), "clip_qkv": (), "qkv_clip": (), "attn_config": (), "attention_sinks": (False,),
    "use_attention_sinks": (False,), "attention_sink_bias": (False,), "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,), "attention_output_gate": (False,), "attn_output_gate": (False,), "attention_gate_func": (),
    "sliding_window": (), "use_sliding_window": (False,), "sliding_window_pattern": (), "sliding_window_size": (),
    "attention_chunk_size": (), "window_size": (), "rswa_window": (), "layer_types": ("full_attention",), "attn_type_list": (1,),
    "hybrid_layer_pattern": (0,), "full_attention_interval": (1,), "global_attn_every_n_layers": (1,), "linear_attn_config": (),
    "index_topk": (), "index_n_heads": (), "index_head_dim": (), "multi_query": (False,), "kv_lora_rank": (), "q_lora_rank": (),
    "num_kv_shared_layers": (0,),
    # norms, residuals, logits, activation
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"), "layernorm_zero_centered_gamma": (False,), "use_post_norm": (False,),
    "post_norm": (False,), "parallel_attn": (False,), "parallel_residual": (False,), "use_parallel_residual": (False,),
    "apply_residual_connection_post_layernorm": (False,), "embedding_multiplier": (1,), "residual_multiplier": (1,),
    "logits_scaling": (1,), "logit_scale": (1,), "scale_emb": (1,), "scale_depth": (), "dim_model_base": (), "embedding_scale": (1,),
    "scale_embeddings": (False,), "lm_head_multiplier": (1,), "output_multiplier_scale": (1,), "mup_enabled": (False,),
    "use_mup": (False,), "mup_scale": (1,), "hidden_act": ("silu",), "hidden_activation": ("silu",), "activation_function": ("silu",),
    "mlp_activation": ("silu",), "use_swiglu": (True,), "swiglu_limit": (), "swiglu_alpha": (),
    # experts
    "num_experts": (0,), "num_local_experts": (0,), "n_routed_experts": (0,), "moe_num_experts": (0,), "is_moe": (False,),
    "use_moe": (False,), "shared_expert_intermediate_size": (0,), "shared_intermediate_size": (0,),
    "moe_shared_expert_intermediate_size": (0,), "n_shared_experts": (0,), "num_shared_experts": (0,), "moe_num_shared_experts": (0,),
    "zero_expert_num": (0,), "first_k_dense_replace": (0,), "num_dense_layers": (0,), "mlp_layer_types": (), "moe_layer_freq": (1,),
    "moe_layers": (), "interleave_moe_layer_step": (1,), "moe_layer_interval": (1,), "n_group": (1,), "topk_group": (1,),
    "num_expert_group": (1,), "routed_scaling_factor": (1,), "router_scaling_factor": (1,), "route_scale": (1,),
    "moe_routed_scaling_factor": (1,), "use_expert_bias": (False,), "moe_router_enable_expert_bias": (False,), "moe_gate_bias": (False,),
    "router_bias": (False,), "moe_apply_router_weight_on_input": (False,), "moe_router_logit_softcapping": (0,),
    "router_logit_softcapping": (0,), "scoring_func": ("softmax",), "score_function": ("softmax",), "router_score_func": ("softmax",),
    "topk_method": ("greedy",),
}  # fmt: skip

# Code that publishers put beside their weights, and that reads only fields which the family's table, its rules or
# `NO_EFFECT` name: what is not among those, it does not read either.
KNOWN_CODE = (
    "configuration_deepseek.DeepseekV3Config",
    "modeling_deepseek.DeepseekV3Model",
    "modeling_deepseek.DeepseekV3ForCausalLM",
)
CODE = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")

# How whoever is being answered can have fields ignored.
TO_IGNORE = {
    "call": "reshard.ignored_config_fields({quoted})",
    "command": "{options}",
    "engine": f"{ENVIRONMENT}={{names}} in the engine's environment",
    "refit": f"reshard.ignored_config_fields({{quoted}}) around the trainer's connect, or "
    f"{ENVIRONMENT}={{names}} in the engine's environment,",
}
_asked_by: ContextVar[str] = ContextVar("asked_by", default="call")
_only_noted: ContextVar[bool] = ContextVar("only_noted", default=False)
_ignored: ContextVar[tuple[str, ...]] = ContextVar("ignored", default=())
_recorded: ContextVar[tuple[str, ...]] = ContextVar("recorded", default=())


@contextmanager
def ignored_config_fields(*names: str, recorded: bool = False) -> Iterator[None]:
    """Ignore these fields of configs, or arguments of checkpoints, inside the context.

    For other processes, such as vLLM's workers, the environment variable RESHARD_IGNORE_CONFIG_FIELDS has the
    same names, with commas between them. What a conversion ignores is `recorded` in its manifest, and is
    ignored again wherever what it wrote is read.
    """
    variable = _recorded if recorded else _ignored
    token = variable.set((*variable.get(), *names))
    try:
        yield
    finally:
        variable.reset(token)


def ignored() -> set[str]:
    """Return the names that are ignored in this context."""
    return {*_ignored.get(), *_recorded.get(), *filter(None, os.environ.get(ENVIRONMENT, "").split(","))}


@contextmanager
def asked_by(means: str) -> Iterator[None]:
    """Have error messages inside say how to ignore a field by one of the means of `TO_IGNORE`."""
    token = _asked_by.set(means)
    try:
        yield
    finally:
        _asked_by.reset(token)


def to_ignore(names: Collection[str]) -> str:
    """Return what has these fields ignored, to be pasted by whoever is being answered.

    >>> to_ignore(["alibi", "bias"])
    'reshard.ignored_config_fields("alibi", "bias")'
    """
    return TO_IGNORE[_asked_by.get()].format(
        quoted=", ".join(f'"{name}"' for name in names),
        options=" ".join(f"--ignore-config-field {name}" for name in names),
        names=",".join(names),
    )


@contextmanager
def meaning_only_noted() -> Iterator[None]:
    """Read configs inside even where they make a model that cannot be mapped; the model's notices say so. For
    callers that look at bytes and sizes only."""
    token = _only_noted.set(True)
    try:
        yield
    finally:
        _only_noted.reset(token)


def meaning_is_only_noted() -> bool:
    """Return True inside `meaning_only_noted`."""
    return _only_noted.get()


def check_ignored(*models: Any) -> None:
    """Raise ReshardError for a name to be ignored that none of these models' configs, arguments and families
    has: it is misspelled.

    Those from the environment may be meant for other processes."""
    known = set().union(*(model.known_names() for model in models))
    for name in _ignored.get():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ReshardError(
                f"{name} is to be ignored, but no such field is in {' or '.join(model.where for model in models)}, "
                f"nor does {models[0].family.name} have one{hint}"
            )


@dataclass(frozen=True)
class Unmapped:
    """Fields of a config that nothing maps: those that may make another model of the same weights
    (`deciding`), and those that transformers' class does not have and no other family knows (`unread`)."""

    deciding: dict[str, Any]
    unread: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return what is wrong with the deciding ones, and how to go on without them; empty without any."""
        if not self.deciding:
            return ""
        fields = listed((f"{name} = {_shown(value)}" for name, value in self.deciding.items()), MAX_NAMED)
        them = "it" if len(self.deciding) == 1 else "them"
        return (
            f"{fields} may make another model of the same weights, and nothing here maps {them}; "
            f"{to_ignore(self.deciding)} goes on without {them}"
        )


def unmapped(
    config: dict[str, Any],
    mapped: Collection[str],
    has_no_effect: Callable[[str], bool],
    defaults: Mapping[str, Any],
    always: Mapping[str, Any],
) -> Unmapped:
    """Sort the fields of a config that are not `mapped` by its family, nor without effect.

    `defaults` are the fields of transformers' config class, `always` those whose value the family fixes.
    """
    deciding: dict[str, Any] = {}
    unread = []
    for name, value in config.items():
        if name in mapped or has_no_effect(name) or name in ignored():
            continue
        if name in defaults:
            harmless = _same(value, defaults[name])
        elif name in always:
            harmless = value is None or _same(value, always[name])
        elif name in ELSEWHERE:
            harmless = _is_harmless(value, ELSEWHERE[name])
        else:
            harmless = value is None or not _has_unknown_code(config)
            if value is not None and harmless:
                unread.append(name)
        if not harmless:
            deciding[name] = value
    return Unmapped(deciding, tuple(unread))


def _is_harmless(value: Any, values: tuple[Any, ...]) -> bool:
    if value is None or isinstance(value, list):
        return all(_is_harmless(entry, values) for entry in value or ())
    return any(_same(value, harmless) for harmless in values)


def _has_unknown_code(config: dict[str, Any]) -> bool:
    """Return True where the model is computed by code of its publisher that may read any field."""
    code = config.get("auto_map")
    if not isinstance(code, dict):
        return False
    named = (str(code[kind]).rpartition("--")[2] for kind in CODE if kind in code)
    return any(name not in KNOWN_CODE for name in named)


def _same(value: Any, default: Any) -> bool:
    numbers = number(value) and number(default)
    return (numbers or type(value) is type(default)) and value == default


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."


def whole_number(value: Any, least: int = 1) -> bool:
    """Return True for an int, not a bool, of at least `least`."""
    return type(value) is int and value >= least


def number(value: Any) -> bool:
    """Return True for a finite number, not a bool."""
    return type(value) in (int, float) and math.isfinite(value)


def without(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the config without these fields."""
    return {name: value for name, value in config.items() if name not in names}
