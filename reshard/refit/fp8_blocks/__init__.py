"""Blocks of fp8 with a scale each, made of a trainer's bf16 or fp32 on the way into an engine.

An engine's rank makes a block itself where it can read all of its fragments in place (`items`).
What is sent instead is made where it lies, and travels as codes and scales (`packed`): half the
bytes of bf16. Between hosts these bytes are the time of a refit: of Qwen3-235B on 8 GPUs 59 GB each
as bf16 and 30 GB as blocks, 1.4 and 0.7 s at 42 GB/s; over NVLink 24 layers of Qwen3-30B-A3B take
24 ms in NCCL buckets as blocks, and 35 ms as bf16 before anything is quantized. Blocks of which
several trainer's ranks hold fragments, and not all can be read in place, come as bf16 into a slab
(`split`). A check makes once more what was made here (`check`).
"""
