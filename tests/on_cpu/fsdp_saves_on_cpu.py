"""Checkpoints that trainers under FSDP2 save with ``torch.distributed.checkpoint``, each with what
``save_pretrained`` makes of the same model gathered."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

from tests.on_cpu.fsdp_on_cpu import sharded


class App(Stateful):
    """What PyTorch's tutorial saves, and trainers that follow it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        raise NotImplementedError


def save(rank: int, cases: list[dict]) -> None:
    """Train the model of each case by one step, and save it in its folder: `how` its trainer does, and as
    ``published``."""
    for case in cases:
        model = _model(**case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        folder = Path(case["folder"])
        SAVERS[case["how"]](model, optimizer, folder / "saved")
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = get_model_state_dict(model, options=whole)
        if rank == 0:
            [architecture] = AutoConfig.from_pretrained(case["source"]).architectures
            plain = getattr(transformers, architecture).from_pretrained(case["source"], dtype=case["dtype"])
            plain.load_state_dict(gathered)
            plain.save_pretrained(folder / "published")


def _model(
    source: str, mesh: dict[str, int], dtype: torch.dtype, experts_dim: int = 0, **_
) -> torch.nn.Module:
    if not experts_dim:
        return sharded(source, mesh, dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    for module in (*model.model.layers, model):
        fully_shard(
            module, mesh=devices, shard_placement_fn=lambda p: Shard(experts_dim) if p.ndim == 3 else None
        )
    return model


def _states(model, optimizer, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "step": 1}, checkpoint_id=folder)


def _side_by_side(model, optimizer, folder: Path) -> None:
    """As torchtitan does: the model's keys with no name in front of them."""
    of_model, of_optimizer = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    others = {"optimizer": of_optimizer, "lr_scheduler": {"last_epoch": 1}, "train_state": torch.tensor(1)}
    dcp.save(of_model | others, checkpoint_id=folder)


def _app(model, optimizer, folder: Path) -> None:
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=folder)


def _model_alone(model, optimizer, folder: Path) -> None:
    dcp.save(model.state_dict(), checkpoint_id=folder / "model")
    dcp.save(get_state_dict(model, optimizer)[1], checkpoint_id=folder / "optim")


def _accelerate(model, optimizer, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, and not used: there is a group
    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(
        num_processes=torch.distributed.get_world_size(),
        process_index=torch.distributed.get_rank(),
        is_fsdp2=True,
    )
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def _ranks(model, optimizer, folder: Path) -> None:
    """As verl does: each rank a file of its own."""
    actor, of = folder / "actor", "world_size_{}_rank_{}.pt"
    actor.mkdir(parents=True, exist_ok=True)
    rank = of.format(torch.distributed.get_world_size(), torch.distributed.get_rank())
    torch.save(model.state_dict(), actor / f"model_{rank}")
    torch.save(optimizer.state_dict(), actor / f"optim_{rank}")
    torch.distributed.barrier()


SAVERS = {
    "states": _states, "side by side": _side_by_side, "app": _app, "alone": _model_alone, "accelerate": _accelerate,
    "ranks": _ranks,
}  # fmt: skip
