"""SGLang's real model classes on the CPU: built, loaded and processed by SGLang's own code, from the
ordinary wheel, with ``.sglang-cpu`` on PYTHONPATH.

Its kernels are not there: no layer is run.
"""

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_LOGGING_LEVEL", "ERROR")

# Its classes of our families; SGLang would import all of its hundreds.
MODELS = (
    "bailing_moe",
    "deepseek_nextn",
    "deepseek_v2",
    "ernie4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "kimi_k25",
    "llama",
    "llama_eagle3",
    "minimax_m2",
    "mistral",
    "mixtral",
    "olmoe",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
)
DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"


def only_our_models() -> None:
    """Have SGLang's registry pass over the other models' files."""
    folder = Path(find_spec("sglang").origin).parent / "srt" / "models"  # type: ignore[union-attr,arg-type]
    others = sorted(path.stem for path in folder.glob("*.py") if path.stem not in MODELS)
    os.environ[DISABLED] = ",".join(others)


only_our_models()

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.eplb import expert_location
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.rotary_embedding import factory as rotary
from sglang.srt.model_loader import get_model
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.standins import bailing  # noqa: F401

# Where torch is built for GPUs it takes one for the device also where there is none.
_module_of = torch.get_device_module
torch.get_device_module = lambda device="cpu": _module_of(device)
# Its defaults for sparse attention are those of a GPU's generation.
torch.cuda.get_device_capability = lambda device=None: (9, 0)
# On a GPU an indexer's two small matrices are one, and positions are embedded without scaling too.
dsa_indexer._is_cuda, dsa_indexer.deep_gemm = True, SimpleNamespace(get_num_sms=lambda: 132)
dsa_indexer.resolve_num_sms = lambda: 132
_scaled = rotary.get_rope_cpu
rotary.get_rope_cpu = lambda *arguments: (
    _scaled(*arguments) if arguments[5] else rotary.get_rope(*arguments[:8])
)
# Latent attention in fp8 derives plain matrices from its blocks, as on a GPU.
deepseek_weight_loader._is_cuda = True


def build(
    directory: str,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    load_format: str = "safetensors",
    dtype: str = "bfloat16",
    hf_overrides: dict | None = None,
    attention_backend: str = "torch_native",
    **options,
) -> tuple[torch.nn.Module, ServerArgs]:
    """A model as a rank of SGLang's has it after start-up, and the server's arguments. Needs a torch
    process group of pp * tp ranks. With `dp` above 1 attention is data parallel, within TP."""
    arguments = ServerArgs(
        model_path=directory, load_format=load_format, dtype=dtype, device="cpu", attention_backend=attention_backend,
        moe_runner_backend="triton", tp_size=tp, pp_size=pp, dp_size=dp, ep_size=ep, enable_dp_attention=dp > 1,
        skip_tokenizer_init=True, disable_cuda_graph=True, disable_shared_experts_fusion=True,
        json_model_override_args=json.dumps(hf_overrides or {}), **options,
    )  # fmt: skip
    if parallel_state._WORLD is not None:
        parallel_state.destroy_model_parallel()  # of another model
    rank = torch.distributed.get_rank()
    start = _start if hasattr(runtime_context, "SpawnRanks") else _start_before_0_5_21
    config = start(arguments, rank)
    located = _located(arguments, config)
    expert_location.set_global_expert_location_metadata(located, allow_overwrite=True)
    torch.distributed.barrier()
    load = LoadConfig(
        load_format=load_format, model_loader_extra_config=options.get("model_loader_extra_config", {})
    )
    return get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu")), arguments


def _start(arguments: ServerArgs, rank: int) -> ModelConfig:
    """Make the groups of a rank's process; return its model's config."""
    ranks = runtime_context.SpawnRanks(world_rank=rank)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    config = ModelConfig.from_server_args(arguments)
    sizes = runtime_context.get_parallel()
    _join(sizes.tp_size * sizes.pp_size, rank)
    parallel_state.initialize_model_parallel()
    dp_attention.initialize_dp_attention(arguments)
    dp_attention.init_dp_gathered_buffer(config)
    initialize_moe_config()
    return config


def _start_before_0_5_21(arguments: Any, rank: int) -> ModelConfig:
    """As `_start`, where SGLang's groups get their sizes by arguments."""
    set_global_server_args_for_scheduler(arguments)
    config = ModelConfig.from_server_args(arguments)
    tp, pp, ep, dp = arguments.tp_size, arguments.pp_size, arguments.ep_size, arguments.dp_size
    _join(tp * pp, rank)
    parallel_state.initialize_model_parallel(tp, ep, pp, attention_data_parallel_size=dp)
    dp_attention.initialize_dp_attention(arguments, config)
    initialize_moe_config(*_wanted(initialize_moe_config, arguments))
    return config


def _join(ranks: int, rank: int) -> None:
    """Let SGLang know the processes' group."""
    parallel_state.init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=rank, distributed_init_method="env://", backend="gloo"
    )


def _located(arguments: ServerArgs, config: ModelConfig) -> Any:
    """Where SGLang puts experts."""
    locate = expert_location.compute_initial_expert_location_metadata
    return locate(*_wanted(locate, arguments), config, parallel_state.get_moe_expert_parallel_rank())


def _wanted(function: Callable[..., Any], arguments: ServerArgs) -> list[ServerArgs]:
    """The server's arguments, if a function wants them: from 0.5.19 on SGLang knows them by itself."""
    return [arguments] if "server_args" in signature(function).parameters else []
