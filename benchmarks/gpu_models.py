"""Real models for the benchmarks on GPUs: Megatron-Core with Transformer Engine layers, and vLLM in the same processes.

The processes are started by torchrun; weights are random.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "max_position_embeddings": 4096}
QWEN3 = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6,
                  "rope_theta": 1000000.0, "attention_bias": False}  # fmt: skip
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                  "num_key_value_heads": 8, "attention_bias": False, "mlp_bias": False}  # fmt: skip

# Published shapes.
MODELS = {
    "llama-3.1-8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3.1-70b": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen2.5-7b": COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
                            "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    "qwen3-32b": QWEN3 | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3-30b-a3b": QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                              "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                              "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
                              "mlp_only_layers": []},
    "deepseek-v3": COMMON | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
                             "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
                             "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                             "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8,
                             "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "norm_topk_prob": True, "moe_layer_freq": 1,
                             "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "attention_bias": False,
                             "num_nextn_predict_layers": 0,
                             "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                                 "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}},
}  # fmt: skip

QUIET = """--micro-batch-size 1 --no-load-optim --no-load-rng --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --attention-backend unfused --no-rope-fusion""".split()


def config_of(name: str, layers: int | None = None) -> dict:
    """A published config, with fewer layers where asked."""
    config = dict(MODELS[name])
    if layers:
        config["num_hidden_layers"] = layers
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = 1
    return config


def flags_of(config: dict, layout) -> list[str]:
    """Megatron-LM's command line for a model in a layout."""
    from reshard.dtypes import DTYPES
    from reshard.megatron import padded_vocab_size
    from reshard.megatron_args import arguments, command_line
    from reshard.model import Model

    model = Model.from_hf(config)
    vocab = padded_vocab_size(model.symbols["V"], 128, layout.tp)
    return " ".join(command_line(arguments(model, layout, vocab, 128, DTYPES["bfloat16"], "transformer_engine"))).split()


def megatron_models(flags: list[str]) -> list:
    """The chunks of this rank, in bf16 on the GPU and wrapped as a trainer wraps them, with Megatron's random weights."""
    import megatron.core.parallel_state as mpu
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator, unset_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.training import global_vars
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    sys.argv = ["pretrain_gpt.py", *flags, *QUIET]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args)
        config = core_transformer_config_from_args(args)
    global_vars.set_args(args)
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(0, None, args.global_batch_size, 1, args.data_parallel_size)
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size, expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1 + torch.distributed.get_rank())
    chunks = args.virtual_pipeline_model_parallel_size or 1
    models = []
    for stage in range(chunks):
        vp_stage = stage if chunks > 1 else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=vp_stage) if config.mtp_num_layers else None
        which = {"ignore_virtual": False, "vp_stage": vp_stage} if chunks > 1 else {}
        model = GPTModel(
            config, spec, args.padded_vocab_size, args.max_position_embeddings, parallel_output=True,
            pre_process=mpu.is_pipeline_first_stage(**which), post_process=mpu.is_pipeline_last_stage(**which),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor, mtp_block_spec=mtp, vp_stage=vp_stage,
        ).cuda()  # fmt: skip
        models.append(Float16Module(config, model).eval())
    return models


def vllm_engine(folder: Path, config: dict, **options):
    """vLLM with dummy weights in this process (``external_launcher``); `folder` gets the config."""
    from vllm import LLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 2048, "gpu_memory_utilization": 0.9, "seed": 0,
               "kv_cache_memory_bytes": 1 << 30, "skip_tokenizer_init": True, "disable_log_stats": True} | options  # fmt: skip
    return LLM(model=str(folder), distributed_executor_backend="external_launcher", dtype="bfloat16", **options)
