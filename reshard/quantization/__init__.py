"""Quantization schemes: how weights become codes with scales, and back.

=====================  =====================================================================
`scheme`               what all schemes have in common
`fp8_blocks`           e4m3 with an fp32 scale for each block, as DeepSeek-V3 is published
`channels`             e4m3 or int8 with a scale for each channel, tensor or block
`int_groups`           int4 or int8, packed, with a scale for each group of columns
`nvfp4`                e2m1 with a scale for each 16 columns, and one for all of a weight
`compressed_tensors`   the configs and names of tensors that compressed-tensors writes
`modelopt`             the same of NVIDIA's Model Optimizer
`mxfp4`                e2m1 with a power of two for each 32 columns, as gpt-oss is published
=====================  =====================================================================

The modules of this table use numpy alone; ``*_torch`` and ``*_triton`` beside them hold the same
arithmetic for tensors and for kernels. All take and give arrays or tensors: files, engines and
transports are above this package.
"""
