"""Megatron's own parser makes the published model of the flags that are written."""

import shutil
from pathlib import Path

import pytest
import torch

from reshard import (
    MegatronLayout,
    hf_to_mcore,
)
from reshard.models.model import Model
from reshard.models.numerics_args import DERIVED, NUMERICS_ARGS
from tests.models.test_published import PUBLISHED
from tests.starting.ranks import run_on_ranks

PARSER = "megatron_parser_on_cpu"


def test_every_argument_of_the_installed_megatron_either_decides_or_does_not():
    """A new argument of Megatron's has to be put into `NUMERICS_ARGS` or into ``not_deciding.txt``."""
    [(actions, fields)] = run_on_ranks(1, "arguments", module=PARSER)
    others = set((Path(__file__).parent / "not_deciding.txt").read_text().split())
    assert (
        actions | fields
    ).keys() - NUMERICS_ARGS.keys() - others == set() and others & NUMERICS_ARGS.keys() == set()
    sizes = {name for name, default in NUMERICS_ARGS.items() if default is DERIVED}
    wrong = {
        name
        for name in NUMERICS_ARGS.keys() & actions.keys() - sizes
        if actions[name] != repr(NUMERICS_ARGS[name])
    }
    assert wrong == set(), "defaults that are not Megatron's"


# What the published configs mean, in the terms of Megatron's config: read off the papers and
# modeling code, not off this project.
EVERYWHERE = {
    "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.02, "add_bias_linear": False, "attention_softmax_in_fp32": True,
    "tokenizer_type": "HuggingFaceTokenizer", "seq_length": 4096, "rotary_percent": 1.0, "rotary_interleaved": False,
    "position_embedding_type": "rope", "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None,
    "num_moe_experts": None, "multi_latent_attention": False, "mtp_num_layers": None, "sequence_parallel": False,
    "qk_layernorm": False, "add_qkv_bias": False, "layernorm_epsilon": 1e-06,
}  # fmt: skip
MEANT = {
    "Llama-2-7b": {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32,
        "num_query_groups": 32, "kv_channels": 128, "layernorm_epsilon": 1e-05, "rotary_base": 10000,
        "untie_embeddings_and_output_weights": True, "vocab_size": 32000, "max_position_embeddings": 4096,
        "params": "fp16",
    },
    "Llama-3.2-1B": {
        "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 64, "layernorm_epsilon": 1e-05, "rotary_base": 500000,
        "use_rope_scaling": True, "rope_scaling_factor": 32.0, "untie_embeddings_and_output_weights": False,
        "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "Qwen2.5-7B": {
        "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28,
        "num_query_groups": 4, "kv_channels": 128, "rotary_base": 1000000, "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": True, "vocab_size": 152064, "max_position_embeddings": 131072,
    },
    "Qwen3-32B": {
        "num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 25600, "num_attention_heads": 64,
        "num_query_groups": 8, "kv_channels": 128, "rotary_base": 1000000, "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Qwen3-32B with YaRN": {
        "num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 25600, "num_attention_heads": 64,
        "num_query_groups": 8, "kv_channels": 128, "rotary_base": 1000000, "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True, "vocab_size": 151936, "max_position_embeddings": 131072,
        "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_beta_fast": 32.0,
        "yarn_original_max_position_embeddings": 32768, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True,
    },
    "Qwen3-30B-A3B": {
        "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
        "ffn_hidden_size": 6144, "rotary_base": 1000000, "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_layer_freq": 1,
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_aux_loss_coeff": 0.001,
        "moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": "fp32", "sequence_parallel": True,
    },
    "DeepSeek-V3": {
        "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "multi_latent_attention": True, "qk_layernorm": True, "rotary_base": 10000, "rope_type": "yarn",
        "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "untie_embeddings_and_output_weights": True, "vocab_size": 129280,
        "max_position_embeddings": 163840, "num_moe_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 8,
        "moe_router_group_topk": 4, "moe_router_dtype": "fp32", "moe_shared_expert_intermediate_size": 2048,
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0001, "mtp_num_layers": 1,
        "sequence_parallel": True, "moe_router_pre_softmax": False,
    },
    "GLM-4.5": {
        "num_layers": 92, "hidden_size": 5120, "ffn_hidden_size": 12288, "num_attention_heads": 96,
        "num_query_groups": 8, "kv_channels": 128, "layernorm_epsilon": 1e-05, "rotary_base": 1000000,
        "rotary_percent": 0.5, "qk_layernorm": True, "add_qkv_bias": True, "untie_embeddings_and_output_weights": True,
        "vocab_size": 151552, "max_position_embeddings": 131072, "num_moe_experts": 160, "moe_router_topk": 8,
        "moe_ffn_hidden_size": 1536, "moe_layer_freq": [0] * 3 + [1] * 89, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 1536, "moe_router_load_balancing_type": "seq_aux_loss",
        "mtp_num_layers": 1, "sequence_parallel": True,
    },
}  # fmt: skip


def published(name: str) -> tuple[dict, MegatronLayout]:
    config, _, layout = PUBLISHED[name.split(" ")[0]]
    if "YaRN" in name:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        config = config | {"rope_scaling": yarn, "max_position_embeddings": 131072}
    return config | ({"aux_loss_alpha": 0.0001, "seq_aux": True} if name == "DeepSeek-V3" else {}), layout


def flags_of(
    config: dict, layout: MegatronLayout, transformer_impl: str = "transformer_engine"
) -> tuple[list[str], int]:
    """The flags as the conversion writes them, word by word, and the size of their world."""
    from reshard.core.dtypes import dtype_named
    from reshard.megatron.arguments import arguments
    from reshard.megatron.flags import command_line
    from reshard.megatron.parameters import padded_vocab_size

    made = Model.from_hf(config)
    dtype = dtype_named(str(config.get("torch_dtype") or "float32"))
    args = arguments(
        made, layout, padded_vocab_size(config["vocab_size"], 128, layout.tp), 128, dtype, transformer_impl
    )
    return " ".join(command_line(args)).split(), layout.world_size(made)


def test_the_flags_alone_make_the_published_model_in_megatrons_own_parser():
    found = run_on_ranks(1, "configs", [flags_of(*published(name)) for name in MEANT], module=PARSER)[0]
    for (name, meant), config in zip(MEANT.items(), found, strict=True):
        wanted = EVERYWHERE | meant
        dtype = wanted.pop("params", "bf16")
        assert config[dtype] and config["tensor_model_parallel_size"] == PUBLISHED[name.split(" ")[0]][2].tp
        assert {key: (config[key], value) for key, value in wanted.items() if config[key] != value} == {}, (
            name
        )
        # Whatever else decides what the model computes is as Megatron has it for a plain transformer.
        plain = {
            key: value
            for key, value in NUMERICS_ARGS.items()
            if key in config and key not in wanted and value is not None
        }
        own = {"num_experts", "moe_router_topk", "moe_ffn_hidden_size", "rope_type", "rope_scaling_factor", "swiglu",
               *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_query_groups",
                 "kv_channels")}  # fmt: skip
        assert {
            key: (config[key], value)
            for key, value in plain.items()
            if key not in own and config[key] != value
        } == {}, name


# What Megatron 0.19 does not restore from a checkpoint's args, of what makes the model (and of the
# flags that its training needs).
NOT_RESTORED = """--norm-epsilon --qk-layernorm --use-rope-scaling --rope-scaling-factor
--rotary-seq-len-interpolation-factor --yarn-original-max-position-embeddings --yarn-beta-fast
--yarn-beta-slow --yarn-correction-range-round-to-int --rotary-scaling-factor --mscale --mscale-all-dim
--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
--rope-type --no-rope-fusion --moe-router-num-groups --moe-router-group-topk --moe-router-dtype
--moe-router-load-balancing-type --moe-aux-loss-coeff --init-method-std --attention-softmax-in-fp32
--transformer-impl --bf16 --fp16 --vocab-size --make-vocab-size-divisible-by --tokenizer-type
--sequence-parallel --tensor-model-parallel-size --pipeline-model-parallel-size --expert-model-parallel-size
--expert-tensor-parallel-size""".split()
RESTORED = [
    "glm4-moe",
    "minimax-m2",
    "ling",
    "llama-rope-tied",
    "llama-bias",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "qwen3-moe-mixed",
    "deepseek-v3",
    "deepseek-v3-no-q-lora",
]


def test_use_checkpoint_args_needs_the_listed_flags_and_no_others(checkpoint, tmp_path):
    cases, flags = [], {"layernorm_epsilon": "--norm-epsilon", "apply_rope_fusion": "--no-rope-fusion"}
    for variant in RESTORED:
        directory = tmp_path / variant
        source = shutil.copytree(checkpoint(variant), tmp_path / f"{variant}-hf")
        (source / "tokenizer.json").write_text("{}")  # whose type is a flag, too
        hf_to_mcore(source, directory, transformer_impl="local")
        lines = (directory / "megatron_flags.txt").read_text().splitlines()
        words = " ".join(lines).split()
        flags |= {word.removeprefix("--").replace("-", "_"): word for word in words if word.startswith("--")}
        passed = [word for line in lines if line.split()[0] in NOT_RESTORED for word in line.split()]
        cases += [(words, str(directory), passed), (words, str(directory), [])]
    [found] = run_on_ranks(1, "restored", cases, module=PARSER)
    assert {variant: wrong for variant, wrong in zip(RESTORED, found[::2]) if wrong} == {}
    needed = {
        flags[name]
        for (words, *_), alone in zip(cases[1::2], found[1::2])
        for name in alone
        if flags.get(name) in words
    }
    # In these small models at Megatron's default, or said as Megatron says it without a flag.
    as_default = {"--bf16", "--fp16", "--kv-lora-rank", "--mscale", "--rope-scaling-factor",
                  "--rotary-seq-len-interpolation-factor", "--yarn-correction-range-round-to-int",
                  "--make-vocab-size-divisible-by", "--sequence-parallel", "--tensor-model-parallel-size",
                  "--pipeline-model-parallel-size", "--expert-model-parallel-size",
                  "--expert-tensor-parallel-size"}  # fmt: skip
    assert needed == set(NOT_RESTORED) - as_default


@pytest.mark.parametrize(
    ("variant", "other"), [("llama", MegatronLayout(tp=2)), ("qwen3-moe", MegatronLayout(ep=2, etp=1))]
)
def test_the_first_loss_of_a_training_is_the_same_at_two_layouts_with_the_flags_alone(
    variant, other, checkpoint, tmp_path
):
    torch.manual_seed(3)
    tokens, losses = torch.randint(0, 1000, (2, 33)), []
    for ranks, layout in ((1, MegatronLayout()), (2, other)):
        hf_to_mcore(checkpoint(variant), tmp_path / str(ranks), layout, transformer_impl="local")
        flags = (tmp_path / str(ranks) / "megatron_flags.txt").read_text().split()
        losses += run_on_ranks(ranks, "training_loss", flags, str(tmp_path / str(ranks)), tokens)
    assert max(losses) - min(losses) < 1e-5, losses
