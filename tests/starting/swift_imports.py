"""ms-swift, mcore-bridge, Transformer Engine's Python and vLLM, imported without a GPU, in an
environment with ms-swift."""

from importlib import import_module

import tests.starting.no_kernels  # noqa: F401

# vLLM last: with it first, transformers' parser sometimes met a union among ms-swift's options
# whose types were in an order that it does not take.
for module in (
    "transformer_engine.pytorch",
    "swift.megatron.pipelines.train.rlhf",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
):
    import_module(module)
