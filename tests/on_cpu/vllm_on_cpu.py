"""vLLM's real model classes on the CPU: built, loaded and processed by vLLM's own code, from the
ordinary wheel.

Only the platform is ours: vLLM's own CPU platform repacks weights and has no MLA. Attention
backends are named, never run.
"""

import contextlib
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import torch._dynamo
import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum


class Host(Platform):
    """A device without kernels of its own: weights stay as they are loaded, as they do on a GPU in bf16."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        if attn_selector_config.use_mla:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
        return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 1 << 34

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 8

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"

    @classmethod
    def supports_fp8(cls):
        return True

    @classmethod
    def import_kernels(cls):
        pass

    @classmethod
    def get_punica_wrapper(cls):
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"


vllm.platforms._current_platform = Host()

from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.fused_moe import config as experts_config
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import utils as model_utils
from vllm.v1.worker import workspace

from tests.standins import bailing  # noqa: F401
from tests.tools import vllm_models

vllm_models.register()

# Kernels that read fp8 blocks as they are loaded, as on a GPU without DeepGEMM; they too are not run.
torch._dynamo.config.disable = True  # what quantizes them is compiled on a GPU


def multiplied(kernel, A, B, As, Bs):
    """A bf16 matrix times blocks, for what MLA derives from them."""
    height, width = kernel.weight_group_shape
    spread = Bs.repeat_interleave(height, 0).repeat_interleave(width, 1)[: B.shape[0], : B.shape[1]]
    return (A.float() @ (B.float() * spread).T).to(torch.bfloat16)


linear_kernels.TritonFp8BlockScaledMMKernel.apply_input_quant = False
linear_kernels.TritonFp8BlockScaledMMKernel.apply_block_scaled_mm = multiplied
linear_kernels.TritonFp8BlockScaledMMKernel.is_supported = classmethod(
    lambda cls, capability=None: (True, None)
)
linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.OOT] = [linear_kernels.TritonFp8BlockScaledMMKernel]
TritonExperts._supports_current_device = staticmethod(lambda: True)


class WithUngatedExperts(Host):
    """A device that has experts without a gate, as a GPU has."""

    def is_xpu(self):
        return True


experts_config.current_platform = WithUngatedExperts()

# The prefill kernels need a GPU to be imported; no attention is run here.
mla_attention.get_mla_prefill_backend = lambda config: type(
    "NoPrefill", (), {"__init__": lambda self, **options: None}
)


def set_up_logging() -> None:
    """Now, where vLLM would do it with the first config, and drop what listens to a logger by then."""
    if hasattr(EngineArgs, "create_logging_config"):
        from vllm.logger import configure_logging_if_needed

        configure_logging_if_needed(EngineArgs().create_logging_config())


def choose_triton() -> None:
    """From now on plain experts are served by Triton's kernels, as on a GPU; they too are not run."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    chosen = UnquantizedMoeBackend.TRITON, TritonExperts
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda *_, **__: chosen


def choose_named() -> None:
    """From now on plain experts are served by the kernels that ``moe_backend`` names, as on a GPU that has them: vLLM
    arranges the weights for these, which are not run."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    def chosen(moe_config):
        if moe_config.moe_backend == "auto":
            return by_vllm(moe_config)
        backend = unquantized.map_unquantized_backend(moe_config.moe_backend)
        return backend, unquantized.backend_to_kernel_cls(backend)[0]

    by_vllm = unquantized.select_unquantized_moe_backend
    unquantized_fused_moe_method.select_unquantized_moe_backend = chosen


def wrap_for_adapters(model: torch.nn.Module, config) -> torch.nn.Module:
    """The model with its layers wrapped for LoRA adapters, as a worker with ``enable_lora`` has it,
    by vLLM's own manager."""
    from types import SimpleNamespace

    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    with set_current_vllm_config(config):
        return LoRAModelRunnerMixin.load_lora_model(SimpleNamespace(), model, config, torch.device("cpu"))


made_groups: tuple[int, ...] = ()  # for which sizes, in this process


def make_groups(rank: int, *sizes: int) -> None:
    """Make vLLM's process groups, in its current config: once for all models of these sizes (tensor, pipeline
    and data parallel, whether there are experts, and whether they are spread)."""
    global made_groups
    if parallel_state.model_parallel_is_initialized() and made_groups == (rank, *sizes):
        return
    if parallel_state._WORLD is None:
        parallel_state.init_distributed_environment(
            torch.distributed.get_world_size(), rank, "env://", rank, "gloo"
        )
    else:
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(*sizes[:2])
    # torch waits for nobody after it has made a group: a rank that has ended its own would fail
    # one that is still connecting
    torch.distributed.barrier()
    made_groups = rank, *sizes


def build(
    directory: str,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    load_format: str = "safetensors",
    rank: int | None = None,
    **options,
):
    """A model as a vLLM worker has it after start-up, and its config. Needs a torch process group
    of dp * pp * tp ranks or more."""
    if "quantization" in options or "hf_overrides" in options:
        from tests.tools import vllm_kernels

        if "flashinfer_trtllm" in (options.get("moe_backend"), options.get("linear_backend")):
            vllm_kernels.interleave_scales()
        if options.get("linear_backend") == "deep_gemm":
            vllm_kernels.pack_scales()
    if "moe_backend" in options:
        choose_named()
    rank = torch.distributed.get_rank() if rank is None else rank
    config = EngineArgs(
        model=directory,
        load_format=load_format,
        dtype=options.pop("dtype", "bfloat16"),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        distributed_executor_backend="external_launcher",
        **options,
    ).create_engine_config()
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        experts = config.model_config.is_moe, config.parallel_config.enable_expert_parallel
        make_groups(rank, tp, pp, dp, *experts)
        workspace.init_workspace_manager(torch.device("cpu"))  # as the worker does
        # vLLM keeps which layers a model lacks by its id(), which models before this one may have had.
        model_utils._model_to_pp_missing_layer_names.clear()
        model = get_model_loader(config.load_config).load_model(
            vllm_config=config, model_config=config.model_config
        )
    return model, config
