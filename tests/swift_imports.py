"""ms-swift, mcore-bridge, Transformer Engine's Python and vLLM, imported without a GPU, in an
environment with ms-swift."""

import sys
import types
from importlib import import_module
from unittest.mock import MagicMock

import transformer_engine.common


class NoKernels(types.ModuleType):
    """In the place of Transformer Engine's compiled part."""

    def __getattr__(self, key: str):
        if key.startswith("__"):
            raise AttributeError(key)
        return vars(self).setdefault(key, MagicMock(name=key))

    @staticmethod
    def get_cudnn_version() -> int:
        return 91000


transformer_engine.common.load_framework_extension = lambda name: None
kernels = NoKernels("transformer_engine_torch")
kernels.get_cudnn_version = NoKernels.get_cudnn_version
sys.modules["transformer_engine_torch"] = kernels
# vLLM last: with it first, transformers' parser sometimes met a union among ms-swift's options
# whose types were in an order that it does not take.
for module in (
    "transformer_engine.pytorch",
    "swift.megatron.pipelines.train.rlhf",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
):
    import_module(module)
