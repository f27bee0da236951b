"""Transformer Engine's Python without its compiled part, which needs a GPU: imported, it is in the place of that."""

import sys
import types
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
