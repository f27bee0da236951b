"""Real Megatron models, their DDP buffers and their distributed optimizer, as any rank of any
layout has them, in one process: torch's fake process group stands for the others."""

from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard import MegatronLayout
from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu
from reshard.models.model import Model


class Held(NamedTuple):
    """Bytes that a rank holds. `padding` are elements of its buffers that are no parameter's."""

    weights: int
    grads: int
    router: int
    main_params: int
    moments: int
    padding: int


@contextmanager
def as_rank(rank: int, world: int, layout: MegatronLayout, cp: int = 1):
    """This process as one rank of many."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with without_gpu():
            initialize_parallel(layout, context_parallel_size=cp, create_gloo_process_groups=False)
            yield
    finally:
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def held(
    model: Model,
    layout: MegatronLayout,
    rank: int,
    world: int,
    cp: int = 1,
    grads: str = "fp32",
    distributed: bool = True,
    optimizer: bool = False,
) -> Held:
    """What Megatron makes for one rank, with local layers."""
    with as_rank(rank, world, layout, cp):
        chunks = build_megatron(model, layout, transformer_impl="local")
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=False,
            bucket_size=None,
            grad_reduce_in_fp32=grads == "fp32",
        )
        router = sum(
            buffer.nbytes
            for chunk in chunks
            for name, buffer in chunk.named_buffers()
            if ".router." in name and buffer.ndim
        )
        # torch's norms are made in fp32 whatever the config says, Transformer Engine's are not
        wrapped = [DistributedDataParallel(chunk.config, options, chunk.bfloat16()) for chunk in chunks]
        buffers = [buffer for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        main = moments = 0
        if optimizer:
            main, moments = _states(wrapped)
        return Held(
            sum(p.nbytes for chunk in chunks for p in chunk.parameters())
            if not distributed
            else sum(buffer.param_data.nbytes for buffer in buffers),
            sum(buffer.grad_data.nbytes for buffer in buffers),
            router,
            main,
            moments,
            sum(buffer.numel - buffer.numel_unpadded for buffer in buffers)
            + sum(buffer.numel_unpadded - sum(p.numel() for p in buffer.params) for buffer in buffers),
        )


def _states(wrapped) -> tuple[int, int]:
    """Bytes of main parameters and of moments of the distributed optimizer, which takes parameters
    on a GPU only."""
    config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    plain, plain_tensor = torch.Tensor.type, torch.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor,
            "type",
            lambda self, *a, **k: plain(self, *a, **k) if a else plain(self).replace("torch.", "torch.cuda."),
        )
        patch.setattr(torch, "tensor", lambda *a, **k: plain_tensor(*a, **k | {"device": None}))
        chained = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
    main = moments = 0
    for each in getattr(chained, "chained_optimizers", [chained]):
        each.init_state_fn(each.optimizer)
        shards = [p for group in each.shard_fp32_from_float16_groups for p in group]
        main += sum(p.nbytes for p in shards)
        state = each.optimizer.state
        moments += sum(state[p][name].nbytes for p in shards for name in ("exp_avg", "exp_avg_sq"))
    return main, moments
