"""Megatron-Bridge's and mcore-bridge's LoRA, imported without a GPU, in an environment with them.

Transformer Engine's Python is the published one, and its compiled part, which needs a GPU, is not there.
Megatron-Bridge's own ``__init__`` imports its training loop, which these tests do not ask for.
"""

import sys
import types
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import megatron
import torch

import tests.starting.no_kernels  # noqa: F401

import_module("transformer_engine.pytorch")
bridge = types.ModuleType("megatron.bridge")
bridge.__path__ = [str(path) for path in (Path(p) / "bridge" for p in megatron.__path__) if path.is_dir()]
sys.modules["megatron.bridge"] = bridge
for module in (
    "megatron.bridge.peft.lora",
    "megatron.bridge.peft.canonical_lora",
    "mcore_bridge.tuners.lora",
    "tests.on_cpu.megatron_on_cpu",
):
    import_module(module)
# Classes of the compiled part that Transformer Engine's Python registers for torch.load.
safe = [value for value in torch.serialization.get_safe_globals() if not isinstance(value, MagicMock)]
torch.serialization.clear_safe_globals()
torch.serialization.add_safe_globals(safe)
import_module(
    "megatron.core.transformer.moe.moe_utils"
).te_general_gemm = None  # as where it is not installed
