"""Refits on the CPU into vLLM's classes of the newest models, which ask for a GPU as they are built."""

from contextlib import suppress
from importlib import import_module

from tests.on_cpu import refit_without_table_on_cpu
from tests.on_cpu.refit_moved_experts_on_cpu import without_streams

# What is asked in vLLM's files, where they are, and what is answered.
ANSWERS = {
    "vllm.models.kimi_k3.nvidia.mla": {"get_mla_prefill_backend": lambda config: NoPrefill},
    "vllm.models.deepseek_v4.nvidia.flashmla": {"compute_fp8_einsum_recipe": lambda: ((1, 128, 128), True)},
    "vllm.models.qwen4_exp.common.ngram_embedding": {
        "get_accelerator_view_from_cpu_tensor": lambda weight: weight
    },
}


class NoPrefill:
    """Kernels of attention, which is not run here."""

    def __init__(self, **options):
        pass


def with_answers() -> None:
    """Answer what vLLM's classes ask of a GPU."""
    without_streams()
    for name, answers in ANSWERS.items():
        with suppress(ModuleNotFoundError):  # a vLLM that has it elsewhere, or not at all
            module = import_module(name)
            for key, answer in answers.items():
                setattr(module, key, answer)


def refit_each(rank: int, sides: dict, cases: dict) -> dict:
    """The same as that of `refit_without_table_on_cpu`."""
    with_answers()
    return refit_without_table_on_cpu.refit_each(rank, sides, cases)
