"""Small real Hugging Face checkpoints, made with transformers from the published configs' fields at
smaller sizes."""

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

try:
    from transformers import MiniMaxM2Config
except ImportError:  # before 5
    MiniMaxM2Config = None

from reshard.models.family import families
from reshard.models.model import Model
from tests.standins.bailing import BailingMoeV2Config

COMMON = dict(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=256,
    initializer_range=0.05,
)
GQA = COMMON | dict(num_key_value_heads=2, intermediate_size=96)
MOE = GQA | dict(
    head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
)
MLA = COMMON | dict(
    intermediate_size=96, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    num_key_value_heads=8, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=32, n_shared_experts=1,
    n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
)  # fmt: skip
GLM = GQA | dict(
    head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1,
    first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, num_mtp_layers=0,
)  # fmt: skip
NEXT = MOE | dict(
    linear_num_key_heads=8, linear_key_head_dim=8, linear_num_value_heads=16, linear_value_head_dim=12,
    shared_expert_intermediate_size=40,
)  # fmt: skip
# Without q and k norm, as GLM-4.5-Air; and what no published config has: more shared experts,
# groups, another part of each head that turns.
GLM_AIR = GLM | dict(use_qk_norm=False, num_experts_per_tok=4, n_shared_experts=2, first_k_dense_replace=2, n_group=4,
                     topk_group=2, partial_rotary_factor=0.25)  # fmt: skip
# A shared expert that is wider than the others.
QWEN2_MOE = GQA | dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=80,
    norm_topk_prob=False,
)  # fmt: skip
PHI = GQA | dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)  # its class's are above the vocabulary
MIXTRAL = GQA | dict(num_local_experts=8, num_experts_per_tok=2)
# With what transformers' class does not have, and vLLM reads.
MINIMAX = MIXTRAL | dict(
    head_dim=16, rotary_dim=8, num_experts_per_tok=3, use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True,
    scoring_func="sigmoid",
)  # fmt: skip
# Of widths that are all different; a pipeline of two stages has Mamba layers on both.
NEMOTRON = {name: value for name, value in GQA.items() if name != "num_hidden_layers"} | dict(
    head_dim=16, layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"],
    mamba_num_heads=8, mamba_head_dim=12, n_groups=4, ssm_state_size=10, n_routed_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=48, moe_shared_expert_intermediate_size=40, routed_scaling_factor=2.5, n_shared_experts=1,
)  # fmt: skip
# Experts in layers 1 and 3 of 4.
ERNIE = GQA | dict(
    moe_num_experts=8, moe_k=3, moe_intermediate_size=48, moe_num_shared_experts=2, moe_layer_interval=2,
    moe_layer_start_index=1, moe_layer_end_index=3,
)  # fmt: skip
DOTS = GQA | dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, n_shared_experts=2, first_k_dense_replace=1,
    routed_scaling_factor=2.5, norm_topk_prob=True, sliding_window=None,
)  # fmt: skip
# With what engines read beside the published code's own fields.
LING = GQA | dict(
    head_dim=16, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=48, num_shared_experts=1,
    first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, partial_rotary_factor=0.5,
    rotary_dim=8, norm_topk_prob=True, score_function="sigmoid", router_dtype="fp32", use_rmsnorm=True,
    pad_token_id=0, eos_token_id=2,
)  # fmt: skip
OLMOE = GQA | dict(intermediate_size=48, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False)
# As wide as its experts, as published: shapes do not tell a matrix from its transposed one. Windows
# and clamps matter in a few tokens.
GPT_OSS = GQA | dict(
    head_dim=16, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, sliding_window=6, swiglu_limit=0.4,
    attention_bias=True,
)  # fmt: skip
# GLM-4.7-Flash and GLM-5 have no groups; an indexer here chooses 10 tokens of a sequence.
DSA = dict(index_n_heads=4, index_head_dim=16, index_topk=10)
GLM_MLA = MLA | dict(n_group=1, topk_group=1, rms_norm_eps=1e-6)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32,
            beta_slow=1, original_max_position_embeddings=4096)  # fmt: skip
GPT_OSS_YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                    original_max_position_embeddings=64)  # fmt: skip
PLAIN_YARN = dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=64)

GLM_ROPE = dict(rope_type="default", rope_theta=1000000.0)


def rope(parameters: dict) -> dict:
    """The fields of a config for these parameters, as the installed transformers spells them."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": parameters}
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": scaling if scaling["rope_type"] != "default" else None,
    }


VARIANTS = {
    "llama": LlamaConfig(**GQA, tie_word_embeddings=False),
    "llama-rope-tied": LlamaConfig(**GQA, head_dim=16, tie_word_embeddings=True, **rope(LLAMA3_ROPE)),
    "llama-bias": LlamaConfig(**GQA, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    # As many key heads as query heads, and a window, as Mistral 7B v0.1 has one.
    "mistral": MistralConfig(**GQA | dict(num_key_value_heads=8), sliding_window=12, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**GQA, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**GQA, tie_word_embeddings=True),
    "qwen2-moe": Qwen2MoeConfig(**QWEN2_MOE, tie_word_embeddings=False),
    "qwen2-moe-mixed": Qwen2MoeConfig(**QWEN2_MOE, tie_word_embeddings=False, mlp_only_layers=[1]),
    "qwen3": Qwen3Config(**GQA, head_dim=32, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**GQA, head_dim=16, tie_word_embeddings=True),
    "qwen3-yarn": Qwen3Config(**GQA, head_dim=32, tie_word_embeddings=False, **rope(PLAIN_YARN)),
    "qwen3-moe": Qwen3MoeConfig(**MOE, tie_word_embeddings=False),
    "qwen3-moe-mixed": Qwen3MoeConfig(**MOE, tie_word_embeddings=False, mlp_only_layers=[1]),
    "qwen3-moe-step": Qwen3MoeConfig(
        **MOE | dict(norm_topk_prob=False), tie_word_embeddings=False, decoder_sparse_step=2
    ),
    "qwen3-next": Qwen3NextConfig(**NEXT, tie_word_embeddings=False),
    "qwen3.5": Qwen3_5TextConfig(
        **{name: value for name, value in NEXT.items() if "exp" not in name and "moe" not in name}
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**NEXT, tie_word_embeddings=False),
    "deepseek-v3": DeepseekV3Config(**MLA, tie_word_embeddings=False, **rope(YARN)),
    "deepseek-v3-no-q-lora": DeepseekV3Config(**MLA | dict(q_lora_rank=None), tie_word_embeddings=False),
    "glm4-moe": Glm4MoeConfig(**GLM, tie_word_embeddings=False),
    "glm4-moe-air": Glm4MoeConfig(**GLM_AIR, tie_word_embeddings=False),
    "glm4-moe-lite": Glm4MoeLiteConfig(**GLM_MLA | dict(routed_scaling_factor=1.8), tie_word_embeddings=False),
    "deepseek-v32": DeepseekV32Config(**MLA | DSA, tie_word_embeddings=False, **rope(YARN)),
    "glm-moe-dsa": GlmMoeDsaConfig(**GLM_MLA | DSA, tie_word_embeddings=False, indexer_rope_interleave=True,
                                   **rope(GLM_ROPE)),
    # Indexers in layers 0 and 2, as GLM-5.2 has one in each fourth layer after the first three.
    "glm-moe-dsa-shared": GlmMoeDsaConfig(
        **GLM_MLA | DSA, tie_word_embeddings=False, indexer_rope_interleave=True, index_topk_freq=2,
        index_skip_topk_offset=1, **rope(GLM_ROPE)
    ),
    "seed-oss": SeedOssConfig(**GQA, head_dim=16, tie_word_embeddings=False),
    # As Phi-3-mini, with a window and as many key heads as query heads; and as Phi-4.
    "phi3": Phi3Config(**PHI | dict(num_key_value_heads=8), sliding_window=12, tie_word_embeddings=False),
    "phi4": Phi3Config(**PHI, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**MIXTRAL, tie_word_embeddings=False),
    "nemotron-h-moe": NemotronHConfig(**NEMOTRON, tie_word_embeddings=False),
    "nemotron-h-moe-latent": NemotronHConfig(**NEMOTRON, moe_latent_size=24, tie_word_embeddings=False),
    "olmoe": OlmoeConfig(**OLMOE, tie_word_embeddings=False),
    "ernie": Ernie4_5_MoeConfig(**ERNIE, tie_word_embeddings=True),
    "dots1": Dots1Config(**DOTS, tie_word_embeddings=False),
    "ling": BailingMoeV2Config(**LING),
    # What no published model has: biases, two shared experts, no norms of queries and keys.
    "ling-bias": BailingMoeV2Config(**LING | dict(num_shared_experts=2, use_qkv_bias=True, use_qk_norm=False)),
    "gpt-oss": GptOssConfig(**GPT_OSS, tie_word_embeddings=False, **rope(GPT_OSS_YARN)),
}  # fmt: skip
if MiniMaxM2Config is not None:
    VARIANTS["minimax-m2"] = MiniMaxM2Config(**MINIMAX, tie_word_embeddings=False)

# DeepSeek-V3's architecture with the published fields of Kimi-K2-Instruct and Moonlight-16B-A3B, at
# small sizes.
NO_GROUPS = MLA | dict(n_group=1, topk_group=1)
KIMI_YARN = YARN | dict(rope_theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0)
OTHERS_OF_DEEPSEEK = {
    "kimi-k2": DeepseekV3Config(
        **NO_GROUPS | dict(n_routed_experts=24, num_experts_per_tok=8, routed_scaling_factor=2.827, rms_norm_eps=1e-6),
        tie_word_embeddings=False, **rope(KIMI_YARN),
    ),
    "moonlight": DeepseekV3Config(
        **NO_GROUPS | dict(q_lora_rank=None, n_shared_experts=2, num_experts_per_tok=6, routed_scaling_factor=2.446,
                           rms_norm_eps=1e-5),
        tie_word_embeddings=False, **rope(dict(rope_type="default", rope_theta=50000.0)),
    ),
}  # fmt: skip

# Sizes of heads and matrices that the kernels of vLLM's build for the CPU take.
WIDE = GQA | dict(hidden_size=128, num_attention_heads=4)
SERVED = {
    "served-llama": LlamaConfig(**WIDE, tie_word_embeddings=False, **rope(LLAMA3_ROPE)),
    "served-qwen2": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "served-qwen3": Qwen3Config(**WIDE, head_dim=64, tie_word_embeddings=False),
    "served-qwen3-moe": Qwen3MoeConfig(**MOE | WIDE | dict(head_dim=32), tie_word_embeddings=False,
                                       mlp_only_layers=[1]),
    "served-qwen3-moe-whole": Qwen3MoeConfig(**MOE | WIDE | dict(head_dim=32), tie_word_embeddings=False),
    # all of a block of fp8 or more, in every direction
    "served-int8": Qwen3MoeConfig(**MOE | WIDE | dict(head_dim=32, moe_intermediate_size=64),
                                  tie_word_embeddings=False),
    "served-blocks": Qwen3Config(
        **WIDE | dict(hidden_size=256, intermediate_size=256, num_key_value_heads=4), head_dim=64,
        tie_word_embeddings=False
    ),
    "served-moe-blocks": Qwen3MoeConfig(**MOE | WIDE | dict(hidden_size=384, head_dim=64, moe_intermediate_size=256),
                                        tie_word_embeddings=False),
    "served-moe-halves": Qwen3MoeConfig(
        **MOE | WIDE | dict(hidden_size=384, num_key_value_heads=4, head_dim=64, moe_intermediate_size=256),
        tie_word_embeddings=False,
    ),  # of whole blocks also at TP 2
    "served-moe-narrow": Qwen3MoeConfig(
        **MOE | WIDE | dict(hidden_size=384, num_key_value_heads=4, head_dim=64, moe_intermediate_size=192),
        tie_word_embeddings=False,
    ),  # of experts that a kernel wants wider
    "olmoe-mha": OlmoeConfig(**OLMOE | dict(num_key_value_heads=8), tie_word_embeddings=False),  # as it is published
    "served-mla-blocks": DeepseekV3Config(
        **MLA | dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, intermediate_size=256,
                     moe_intermediate_size=128, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32,
                     qk_rope_head_dim=32, v_head_dim=32),
        tie_word_embeddings=False, **rope(YARN),
    ),
    "served-glm4-moe": Glm4MoeConfig(**GLM | WIDE | dict(head_dim=64), tie_word_embeddings=False),
    "served-mixtral": MixtralConfig(**MIXTRAL | WIDE | dict(head_dim=32), tie_word_embeddings=False),
    "served-olmoe": OlmoeConfig(**OLMOE | WIDE, tie_word_embeddings=False),
    "served-deepseek-v3": DeepseekV3Config(
        **MLA | dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=32,
                     qk_rope_head_dim=32, v_head_dim=32),
        tie_word_embeddings=False, **rope(YARN),
    ),
}  # fmt: skip


def make(
    directory: Path, variant: str, dtype: torch.dtype = torch.float32, seed: int = 0, mtp: bool = False,
    copies: bool = True,
) -> Path:  # fmt: skip
    """Save a model of this variant with random weights; norms and router biases random too, so that
    an exchange shows. Its MTP layer has `copies` of the embedding and of the output, or none, as GLM-4.6's."""
    if variant == "minimax-m2" and MiniMaxM2Config is None:
        import pytest

        pytest.skip(f"transformers {transformers.__version__} has no MiniMax-M2")
    torch.manual_seed(seed)
    # A copy: saving writes the dtype into the config, and the next model of the variant would be
    # made in that dtype.
    config = copy.deepcopy((VARIANTS | OTHERS_OF_DEEPSEEK | SERVED)[variant])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if "norm" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model = model.to(dtype)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    if "layers_block_type" in config:  # vLLM reads what most published configs have
        config["hybrid_override_pattern"] = model.config.hybrid_override_pattern
        config["num_hidden_layers"] = len(config.pop("layers_block_type"))
        config["num_nextn_predict_layers"] = int(mtp)
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        if mtp:
            _add_single_mtp(directory, model, dtype)
    if config["model_type"] == "qwen3_next" and mtp:
        (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2))
        _add_named_mtp(directory, model, dtype)
    if "first_k_dense_replace" in config:
        # The published configs have these; transformers' own classes neither read nor write them,
        # engines need them.
        config.pop("num_mtp_layers", None)
        if "index_topk" in config:  # of transformers' own, which older ones refuse
            config.pop("layer_types", None)
        if families()[config["model_type"]].field_of("mtp_num_layers"):
            config |= {"num_nextn_predict_layers": int(mtp)}
        config |= (
            {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
            if config["model_type"] in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
            else {}
        )
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        if mtp:
            _add_mtp(directory, model, dtype, copies)
    return directory


def _add_mtp(directory: Path, model, dtype: torch.dtype, copies: bool) -> None:
    """A multi-token-prediction layer, as the published checkpoint has it: transformers builds none."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    last = f"model.layers.{layers - 1}."
    # An indexer too, where the last layer has none.
    earlier = f"model.layers.{layers - 2}.self_attn.indexer."
    like = {
        name: name.replace(f".{layers - 2}.", f".{layers - 1}.")
        for name in tensors
        if name.startswith(earlier)
    }
    like |= {name: name for name in tensors if name.startswith(last)}
    for name, in_last in sorted(like.items()):
        tensors[f"model.layers.{layers}." + in_last.removeprefix(last)] = (
            torch.randn(tensors[name].shape).mul(0.05).to(tensors[name].dtype)
        )
    prefix = f"model.layers.{layers}."
    is_ling = model.config.model_type == "bailing_moe_v2"
    norm = "final_layernorm.weight" if is_ling else "shared_head.norm.weight"
    for name, shape in (("enorm.weight", [hidden]), ("hnorm.weight", [hidden]),
                        ("eh_proj.weight", [hidden, 2 * hidden]), (norm, [hidden])):  # fmt: skip
        tensors[prefix + name] = torch.randn(shape).mul(0.05).to(dtype)
    if copies and not is_ling:
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _add_named_mtp(directory: Path, model, dtype: torch.dtype) -> None:
    """A multi-token-prediction layer under names of its own, whose decoder layer is like the model's last."""
    from safetensors.torch import load_file, save_file

    tensors, hidden = load_file(directory / "model.safetensors"), model.config.hidden_size
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    for name in sorted(name for name in tensors if name.startswith(last)):
        tensor = torch.randn(tensors[name].shape).mul(0.05).to(tensors[name].dtype)
        tensors[f"mtp.layers.0.{name.removeprefix(last)}"] = tensor
    for name, *shape in (
        ("fc", hidden, 2 * hidden),
        ("norm", hidden),
        ("pre_fc_norm_hidden", hidden),
        ("pre_fc_norm_embedding", hidden),
    ):
        tensors[f"mtp.{name}.weight"] = torch.randn(shape).mul(0.05).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _add_single_mtp(directory: Path, model, dtype: torch.dtype) -> None:
    """A multi-token-prediction layer of an attention and a layer of experts, each like the last of its kind."""
    from safetensors.torch import load_file, save_file

    tensors, hidden = load_file(directory / "model.safetensors"), model.config.hidden_size
    for part, letter in enumerate("*E"):
        like = f"backbone.layers.{model.config.hybrid_override_pattern.rindex(letter)}."
        for name in sorted(name for name in tensors if name.startswith(like)):
            tensor = torch.randn(tensors[name].shape).mul(0.05).to(tensors[name].dtype)
            tensors[f"mtp.layers.{part}." + name.removeprefix(like)] = tensor
    for name, shape in (
        ("0.enorm", [hidden]),
        ("0.hnorm", [hidden]),
        ("0.eh_proj", [hidden, 2 * hidden]),
        ("1.final_layernorm", [hidden]),
    ):
        tensors[f"mtp.layers.{name}.weight"] = torch.randn(shape).mul(0.05).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def hf_logits(directory: Path, tokens: torch.Tensor, latent_epsilon: float | None = None) -> torch.Tensor:
    """transformers' own logits, ``[batch, sequence, vocabulary]``; `latent_epsilon` is that of the
    norms inside latent attention, which its class takes from no config."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, module in model.named_modules():
        if latent_epsilon is not None and name.endswith("_a_layernorm"):
            module.variance_epsilon = latent_epsilon
    with torch.no_grad():
        return model(tokens).logits


def config_of(variant: str, **changes) -> dict:
    """The config of a small variant, with other values in some fields."""
    config = VARIANTS[variant].to_dict() | changes
    return config | {
        "architectures": config.get("architectures")
        or [families()[VARIANTS[variant].model_type].architecture]
    }


def model(variant: str, **changes) -> Model:
    """A small variant as a model, with other values in some fields of its config."""
    return Model.from_hf(config_of(variant, **changes))


def with_config(source: Path, to: Path, **changes) -> Path:
    """A copy of a Hugging Face directory with other values in some fields of its config."""
    shutil.copytree(source, to)
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to
