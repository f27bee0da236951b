"""Megatron-LM's arguments as a command line and as the ``args`` of a checkpoint."""

from typing import Any

from reshard.dtypes import Dtype
from reshard.formats.pickles import Name
from reshard.layout import Layout
from reshard.model import Model

FLAGS_FILE = "megatron_flags.txt"

# Flags that are not spelled like the argument, or say the opposite.
SPELLINGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
WHEN_FALSE = {"add_bias_linear": "--disable-bias-linear", "apply_rope_fusion": "--no-rope-fusion"}
NO_FLAG = {"context_parallel_size"}


def arguments(model: Model, layout: Layout, padded_vocab: int, divisible_by: int, dtype: Dtype, transformer_impl: str) -> dict[str, Any]:
    """All arguments that describe a model in a layout, by their names in ``args``."""
    args = model.megatron_args() | layout.megatron_args()
    args |= {"make_vocab_size_divisible_by": divisible_by, "padded_vocab_size": padded_vocab, "transformer_impl": transformer_impl}
    args |= {"bf16": dtype.name == "bfloat16", "fp16": dtype.name == "float16"}
    if not model.num_experts:
        args.pop("expert_tensor_parallel_size")
    if transformer_impl == "local":
        args["moe_grouped_gemm"] = False
    return args


def command_line(args: dict[str, Any]) -> list[str]:
    """The flags of Megatron-LM for these arguments, one ``--flag value`` an item."""
    flags = []
    string_layout = args.get("pipeline_model_parallel_layout") is not None
    for name, value in args.items():
        flag = SPELLINGS.get(name, "--" + name.replace("_", "-"))
        if name in NO_FLAG or value is None or (name == "virtual_pipeline_model_parallel_size" and string_layout):
            continue
        if name == "num_query_groups" and not args.get("group_query_attention"):
            continue
        if isinstance(value, bool):
            if not value and name in WHEN_FALSE:
                flags.append(WHEN_FALSE[name])
            elif value and name not in WHEN_FALSE:
                flags.append(flag)
        elif isinstance(value, list):
            flags.append(f"{flag} [{','.join(map(str, value))}]")
        else:
            flags.append(f"{flag} {value}")
    return flags


def checkpoint_args(args: dict[str, Any], world_size: int, dtype: Dtype, iteration: int) -> dict[str, Any]:
    """The ``args`` that a training run with these arguments would have saved, as far as loading reads them."""
    per_model = args["tensor_model_parallel_size"] * args["pipeline_model_parallel_size"]
    return args | {
        "params_dtype": Name("torch", dtype.name), "world_size": world_size, "data_parallel_size": world_size // per_model,
        "add_position_embedding": True, "iteration": iteration, "consumed_train_samples": 0, "consumed_valid_samples": 0,
        "skipped_train_samples": 0, "ckpt_format": "torch_dist", "use_distributed_optimizer": False, "no_save_optim": True,
        "no_save_rng": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "rotary_interleaved": False,
    }  # fmt: skip
