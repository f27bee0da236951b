"""Models under Megatron's generalized tensor parallelism (GTP), on the CPU, with its own local layers."""

import megatron.core.parallel_state as mpu
import torch
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
from megatron.core.tensor_parallel import gtp_api

from tests.on_cpu import megatron_on_cpu

SHARDS, EXPERT_SHARDS = "--tensor-parallel-num-weight-shards", "--expert-tensor-parallel-num-weight-shards"


def allow_gtp() -> None:
    """Let Megatron save and load GTP's shards without Transformer Engine, which only its gathers need."""
    gtp.HAVE_TE = gtp_api.HAVE_GTP = True
    gtp.QuantizedTensor = ()


def build(flags: list[str], directory: str, sizes: tuple[int, int]):
    """This rank's chunks under GTP with the weights that Megatron's loader reads from a checkpoint into
    the same ranks without GTP, cut by Megatron, and its args; and these weights."""
    allow_gtp()
    models, args = megatron_on_cpu.build(flags)
    megatron_on_cpu.load(models, args, directory)
    whole = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    torch.distributed.barrier()
    mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()
    weights = args.tensor_model_parallel_size * sizes[0], args.expert_tensor_parallel_size * sizes[1]
    models, args = megatron_on_cpu.build([*flags, SHARDS, str(weights[0]), EXPERT_SHARDS, str(weights[1])])
    with torch.no_grad():
        for model, values in zip(models, whole, strict=True):
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                value = values[name]
                if gtp.is_gtp_param(tensor):
                    value = gtp._gtp_slice_one_param(value, tensor.group, name=name)
                    assert value.pad_length == tensor.pad_length
                tensor.copy_(value)
    return models, args, whole


def as_from_a_gpu() -> None:
    """Let shards be saved as plain tensors, which they are once they are copied from a GPU."""
    gtp.GTPShardedParam.to = lambda self, *a, **k: torch.Tensor.to(self, *a, **k).as_subclass(torch.Tensor)


def save(
    rank: int,
    flags: list[str],
    source: str,
    sizes: tuple[int, int],
    directory: str,
    args: bool = True,
    **metadata,
) -> None:
    """Save such a model with Megatron's own code, with the arguments or without."""
    models, arguments, _ = build(flags, source, sizes)
    as_from_a_gpu()
    megatron_on_cpu.save(models, directory, {"args": arguments} if args else {}, metadata or None)
