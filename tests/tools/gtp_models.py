"""Megatron's models under generalized tensor parallelism (GTP) on the CPU, with weights that Megatron cuts itself."""

import megatron.core.parallel_state as mpu
import torch
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
from megatron.core.tensor_parallel import gtp_api

from tests.on_cpu import megatron_on_cpu

FLAGS = "--tensor-parallel-num-weight-shards", "--expert-tensor-parallel-num-weight-shards"
# A rank's whole tensors of each chunk, as they would be without GTP.
Whole = list[dict[str, torch.Tensor]]


plain_slice = gtp._gtp_slice_one_param


def sliced(param, *arguments, **options):
    """What Megatron cuts of a parameter, an expert's still marked as one: of its classes for experts only those of
    Transformer Engine mark it after that."""
    shard = plain_slice(param, *arguments, **options)
    if hasattr(param, "allreduce"):
        shard.allreduce = param.allreduce
    return shard


def allow_gtp() -> None:
    """Let Megatron save and load GTP's shards without Transformer Engine, which its gathers need, and save them as
    plain tensors, which they are once they are copied from a GPU."""
    gtp.HAVE_TE = gtp_api.HAVE_GTP = True
    gtp.QuantizedTensor, gtp._gtp_slice_one_param = (), sliced
    gtp.GTPShardedParam.to = lambda self, *a, **k: torch.Tensor.to(self, *a, **k).as_subclass(torch.Tensor)


def build(flags: list[str], directories: list[str], dtype: torch.dtype = torch.float32):
    """This rank's chunks under GTP, Megatron's args, and for each of these checkpoints what Megatron's loader reads
    from it into the same ranks without GTP."""
    allow_gtp()
    without = [
        word for at, word in enumerate(flags) if word not in FLAGS and flags[max(at - 1, 0)] not in FLAGS
    ]
    models, args = built(without, dtype)
    wholes: list[Whole] = []
    for directory in directories:
        megatron_on_cpu.load(models, args, directory)
        wholes.append([{n: t.clone() for n, t in named(model)} for model in models])
    torch.distributed.barrier()
    mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()
    return *built(flags, dtype), wholes


def built(flags: list[str], dtype: torch.dtype):
    models, args = megatron_on_cpu.build(flags)
    return [model.to(dtype) for model in models], args


def named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def fill(models, whole: Whole) -> None:
    """Give the chunks these tensors, of which Megatron cuts this rank's shards."""
    with torch.no_grad():
        for model, values in zip(models, whole, strict=True):
            for name, tensor in named(model):
                value = values[name]
                if gtp.is_gtp_param(tensor):
                    value = gtp._gtp_slice_one_param(value, tensor.group, name=name)
                    assert value.pad_length == tensor.pad_length
                tensor.copy_(value)
