"""Megatron-FSDP on the CPU: real models under its wrapper, saved as Megatron-LM saves ``fsdp_dtensor``."""

import contextlib
import io

import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import checkpointing

from tests.on_cpu import megatron_on_cpu


class _Stream:
    """Stands for a CUDA stream: everything has been done when a call returns."""

    def __init__(self, *_, **__):
        self.device = torch.device("cpu")

    def wait_stream(self, *_):
        pass

    wait_event = record_event = synchronize = wait_stream


def _without_cuda() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = lambda *a: _Stream()
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.set_rng_state = lambda *a: None
    torch.cuda.current_device = lambda: 0
    plain = adapter.DeviceMesh

    class OnCpu:
        @staticmethod
        def from_group(group, device_type, **options):
            return plain.from_group(group, device_type="cpu", **options)

    adapter.DeviceMesh = OnCpu


def save(rank: int, flags: list[str], source: str, destination: str) -> None:
    """Load a ``torch_dist`` checkpoint into Megatron's model, put it under Megatron-FSDP, and save that."""
    models, args = megatron_on_cpu.build(flags)
    megatron_on_cpu.load(models, args, source)
    _without_cuda()
    [model] = models
    config: TransformerConfig = model.config
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", bucket_size=None
    )
    with contextlib.redirect_stdout(io.StringIO()):
        wrapped = adapter.FullyShardedDataParallel(config, ddp, model, device=torch.device("cpu"))
    args.ckpt_format, args.use_megatron_fsdp, args.no_save_optim = "fsdp_dtensor", True, True
    state = checkpointing.generate_state_dict(args, [wrapped], None, None, {}, iteration=7)
    state["iteration"] = 7
    state = checkpointing.preprocess_fsdp_dtensor_state_dict(args, state, wrapped)
    states = {f"module.{name}": {"exp_avg": t} for name, t in state["model"].items() if torch.is_tensor(t)}
    state["optimizer"] = {"state": states}
    writer = torch.distributed.checkpoint.FileSystemWriter(f"{destination}/iter_0000007")
    torch.distributed.checkpoint.save(state, storage_writer=writer)
    if rank == 0:
        with open(f"{destination}/latest_checkpointed_iteration.txt", "w") as tracker:
            tracker.write("7")
