"""The Pythons that tests start processes with: which modules each has imported before it is forked.

Pytest's workers are forked in the same way, from the server of the ranks; `share` starts the
servers that they have in common.
"""

import functools
import os
import sys

from tests.starting.fork_server import python

# Modules that vLLM imports for any quantized config.
QUANTIZED = (
    *(f"vllm.model_executor.layers.quantization.{name}" for name in (
        "auto_awq", "auto_gptq", "bitsandbytes", "compressed_tensors.compressed_tensors", "experts_int8", "fbgemm_fp8",
        "fp_quant", "humming", "inc", "modelopt", "moe_wna16", "online.base", "online.fp8", "quark.quark", "torchao",
    )),
    "vllm.models.deepseek_v4.quant_config",
)  # fmt: skip
# Modules that take long to import, in processes of an engine, and on ranks (ranks.py), in commands of
# a trainer or in pytest's workers.
OF_ENGINES = (
    "tests.starting.entry_points",
    "tests.starting.ports",
    "tests.starting.torchrun_methods",
    "tests.starting.no_spinning",
    "tests.starting.quick_ends",
    "tests.starting.no_dunders",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.entrypoints.serve.tokenize.api_router",
    "torch.distributed.run",
    "megatron.core",
    "transformers",
    "reshard.engines.vllm.load_format.loader",
    "reshard.engines.vllm.worker",
    "reshard.integrations.vllm.transfer",
    "reshard.parity.systems.megatron",
    *QUANTIZED,
)
# What verl imports, without Ray, in each of its processes.
OF_VERL = ("datasets", "hydra", "peft", "tensordict")
WITH_RAY = (
    "tests.starting.without_ray",
    *OF_ENGINES,
    *OF_VERL,
    "tests.starting.with_ray",
)  # in an environment that has Ray
OF_RANKS = (
    "tests.starting.entry_points",
    "tests.starting.ports",
    "tests.starting.torchrun_methods",
    "tests.starting.no_spinning",
    "tests.on_cpu.megatron_on_cpu",
    "tests.on_cpu.parity_on_cpu",
    "tests.on_cpu.refit_faults_on_cpu",
    "tests.on_cpu.live_megatron_on_cpu",
    "tests.on_cpu.fsdp_on_cpu",
    "tests.tools.disk",
    "tests.starting.command_line",
    "reshard.parity.systems.megatron",
    "reshard.engines.vllm.load_format.loader",
    "vllm.distributed.weight_transfer",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.mla.triton_mla",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "transformers.generation.utils",
    "vllm.v1.executor",
    "vllm.v1.worker.lora_model_runner_mixin",
    "vllm.third_party.deep_gemm",
    "torch.utils.serialization",
    "bokeh.plotting",
    *QUANTIZED,
)
# On ranks of SGLang's classes, and of the trainers that refit them.
OF_SGLANG = (
    "tests.starting.entry_points",
    "tests.starting.ports",  # before others have its functions by name
    "tests.starting.command_line",
    "tests.on_cpu.refit_sglang_on_cpu",
    "sglang.srt.models.registry",
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.data_parallel_controller",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
)
# In the commands and the Python of the pages.
OF_PAGES = (
    "tests.starting.entry_points", "tests.starting.torchrun_methods", "tests.starting.command_line",
    "torch.distributed.run", "reshard.parity.systems.megatron", "transformers", "transformers.generation.utils",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop", "bokeh.plotting",
)  # fmt: skip
SGLANG_WITH_RAY = (
    "tests.starting.without_ray",
    *OF_SGLANG,
    "sglang.srt.entrypoints.http_server",
    *OF_VERL,
    "tests.starting.with_ray",
)


@functools.cache
def python_of_engine() -> str:
    """Return a Python with vLLM's build for the CPU and all that processes of engines and trainers
    usually import."""
    from tests.install_vllm_cpu import environment_of_engine

    return os.environ.get("WARM_ENGINES") or python(*OF_ENGINES, environment=environment_of_engine())


@functools.cache
def python_of_ranks() -> str:
    """Return the Python of the processes that `ranks` starts."""
    return os.environ.get("WARM_RANKS") or python(
        *OF_RANKS, environment=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    )


@functools.cache
def python_with_ray() -> str:
    """Return the Python of an environment with Ray and verl, and stand-ins for ROLL and NeMo-RL, which finds
    this one's packages behind its own and has vLLM's build for the CPU."""
    from tests.tools.clones import RAY_PACKAGES, STANDINS, variables

    return os.environ.get("WARM_RAY") or python(
        *WITH_RAY, environment=variables(STANDINS), packages=RAY_PACKAGES
    )


@functools.cache
def python_of_sglang() -> str:
    """Return the Python of ranks with SGLang's packages, which are other versions than vLLM's."""
    from tests.install_sglang_cpu import environment_of_engine

    return os.environ.get("WARM_SGLANG") or python(*OF_SGLANG, environment=environment_of_engine())


@functools.cache
def python_of_pages(hub: str) -> str:
    """Return the Python of the pages' commands, which find all models in a cache of the hub: where that is
    is read at import."""
    return os.environ.get("WARM_PAGES") or python(*OF_PAGES, environment=os.environ | variables_of_pages(hub))


def variables_of_pages(hub: str) -> dict[str, str]:
    """Return the environment's variables of the pages' commands."""
    return {"HF_HOME": hub, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def python_of_trainer() -> str:
    """Return the Python of commands that make models of Megatron and transformers: that of the ranks,
    which has imported both."""
    return python_of_ranks()


def share() -> str:
    """Return a Python for pytest's workers, and start the others for all of them, so that imports
    are done once."""
    import atexit
    import shutil
    import tempfile

    from tests import install_sglang_cpu, install_vllm_cpu

    # Engines leave the sockets of their queues where they end by a signal.
    sockets = tempfile.mkdtemp(prefix="vllm")
    atexit.register(shutil.rmtree, sockets, ignore_errors=True)
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    hub = tempfile.mkdtemp(prefix="hub")
    atexit.register(shutil.rmtree, hub, ignore_errors=True)
    os.environ["WARM_HUB"] = hub
    programs = {"WARM_RANKS": python_of_ranks(), "WARM_PAGES": python_of_pages(os.path.join(hub, "models"))}
    if install_vllm_cpu.installed():
        programs |= {"WARM_ENGINES": python_of_engine(), "WARM_RAY": python_with_ray()}
    if install_sglang_cpu.installed():
        programs["WARM_SGLANG"] = python_of_sglang()
    os.environ.update(programs, WARM_EXECUTABLE=sys.executable)
    return programs["WARM_RANKS"]
