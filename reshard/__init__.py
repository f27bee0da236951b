"""reshard: the same weights in Hugging Face, Megatron-Core, vLLM and SGLang, moved exactly and fast.

The calls of the command line, as a library. Importing the package imports neither torch nor numpy.

>>> import reshard
>>> reshard.hf_to_mcore("Qwen3-30B-A3B", "mcore", reshard.MegatronLayout(tp=4, pp=2, ep=4))  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy
from reshard.core.version import __version__ as __version__

if TYPE_CHECKING:
    from reshard import delta, engines, parity, refit, trainers
    from reshard.core.errors import ReshardError
    from reshard.digest_of import digest
    from reshard.engines.sglang.weights.layout import SglangLayout
    from reshard.engines.vllm.layout import VllmLayout
    from reshard.live.delta_writer import DeltaWriter
    from reshard.live.export import export
    from reshard.live.load import load
    from reshard.live.offload import offload, onload
    from reshard.live.save import save
    from reshard.megatron.layout import MegatronLayout
    from reshard.memory.estimate import estimate_memory
    from reshard.models.config_fields import ignored_config_fields
    from reshard.plan import plan_refit
    from reshard.storage.check import check
    from reshard.storage.compare import diff
    from reshard.storage.convert import fsdp_to_hf, hf_to_mcore, mcore_to_hf, mcore_to_mcore
    from reshard.storage.inspection import inspect
    from reshard.storage.lora.convert import lora_merge, lora_to_megatron, lora_to_peft
    from reshard.storage.sources.opening import read_model

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "DeltaWriter": "reshard.live.delta_writer",
            "MegatronLayout": "reshard.megatron.layout",
            "ReshardError": "reshard.core.errors",
            "SglangLayout": "reshard.engines.sglang.weights.layout",
            "VllmLayout": "reshard.engines.vllm.layout",
            "check": "reshard.storage.check",
            "delta": "reshard.delta",
            "diff": "reshard.storage.compare",
            "digest": "reshard.digest_of",
            "engines": "reshard.engines",
            "estimate_memory": "reshard.memory.estimate",
            "export": "reshard.live.export",
            "fsdp_to_hf": "reshard.storage.convert",
            "hf_to_mcore": "reshard.storage.convert",
            "ignored_config_fields": "reshard.models.config_fields",
            "inspect": "reshard.storage.inspection",
            "load": "reshard.live.load",
            "lora_merge": "reshard.storage.lora.convert",
            "lora_to_megatron": "reshard.storage.lora.convert",
            "lora_to_peft": "reshard.storage.lora.convert",
            "mcore_to_hf": "reshard.storage.convert",
            "mcore_to_mcore": "reshard.storage.convert",
            "memory": "reshard.memory",
            "offload": "reshard.live.offload",
            "onload": "reshard.live.offload",
            "parity": "reshard.parity",
            "plan_refit": "reshard.plan",
            "read_model": "reshard.storage.sources.opening",
            "refit": "reshard.refit",
            "save": "reshard.live.save",
            "trainers": "reshard.trainers",
        },
        needs={
            "torch": ["DeltaWriter", "offload", "onload", "trainers"],
            "megatron.core": ["export", "load", "save"],
        },
    )
__all__ = [
    "DeltaWriter",
    "MegatronLayout",
    "ReshardError",
    "SglangLayout",
    "VllmLayout",
    "check",
    "delta",
    "diff",
    "digest",
    "engines",
    "estimate_memory",
    "export",
    "fsdp_to_hf",
    "hf_to_mcore",
    "ignored_config_fields",
    "inspect",
    "load",
    "lora_merge",
    "lora_to_megatron",
    "lora_to_peft",
    "mcore_to_hf",
    "mcore_to_mcore",
    "offload",
    "onload",
    "parity",
    "plan_refit",
    "read_model",
    "refit",
    "save",
    "trainers",
]
