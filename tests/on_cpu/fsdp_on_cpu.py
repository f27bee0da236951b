"""Refits on the CPU from real transformers models under ``fully_shard`` into vLLM's real model classes."""

import gc

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from reshard.engines import VllmModel
from reshard.refit import connect
from reshard.refit.fp8_blocks import split
from reshard.trainers import FsdpModel
from tests.on_cpu import vllm_on_cpu
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start

COLWISE = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def sharded(
    directory: str, mesh: dict[str, int], dtype: torch.dtype = torch.bfloat16, narrow: tuple[str, ...] = ()
) -> torch.nn.Module:
    """The model of a directory on a mesh of ``replicate``, ``shard`` and ``tp``: tensor parallel
    linear layers, then FSDP around each layer. Modules with a name that is `narrow` are in bf16."""
    config = AutoConfig.from_pretrained(directory)
    whole = type(config) not in AutoModelForCausalLM._model_mapping
    kind = getattr(transformers, config.architectures[0]) if whole else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=dtype)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in narrow:
            module.to(torch.bfloat16)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if "tp" in mesh:
        for layer in model.model.layers:
            plan = {}
            for name, module in layer.named_modules():
                if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in COLWISE + ROWWISE:
                    plan[name] = (
                        ColwiseParallel() if name.rpartition(".")[2] in COLWISE else RowwiseParallel()
                    )
            parallelize_module(layer, devices["tp"], plan)
    data = devices[tuple(name for name in mesh if name != "tp")]
    inner = getattr(model, "model", model)
    for layer in getattr(getattr(inner, "language_model", inner), "layers", ()):
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model


def copy_shards(source: torch.nn.Module, destination: torch.nn.Module) -> None:
    """The shards of one model into the memory of another that is sharded alike."""
    with torch.no_grad():
        for (_, a), (_, b) in zip(everything(source), everything(destination), strict=True):
            local = b.to_local() if isinstance(b, DTensor) else b
            local.copy_(a.to_local() if isinstance(a, DTensor) else a)


def everything(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def refit_twice(
    rank: int,
    sides: dict,
    mesh: dict[str, int],
    checkpoints: list[str],
    engine: dict,
    moving: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    narrow: tuple[str, ...] = (),
    slab_bytes: int = split.SLAB_BYTES,
):
    """Refit from each of two Hugging Face directories in turn; as `refit_on_cpu.refit_twice`. With
    `moving` the model is moved and run before each refit. Blocks in parts come in rounds of
    `slab_bytes`."""
    split.SLAB_BYTES = slab_bytes
    is_trainer, is_engine, members = start(rank, sides)
    source = model = destination = None
    if is_trainer:
        model = sharded(checkpoints[0], mesh, dtype, narrow)
        source = FsdpModel(model)
    if is_engine:
        module, config = vllm_on_cpu.build(checkpoints[0], load_format="dummy", **engine)
        destination = VllmModel(module, config)
    link = connect(members, source, destination, backend=backend)
    held = []
    for step, checkpoint in enumerate(checkpoints):
        if step and model is not None:
            copy_shards(sharded(checkpoint, mesh, dtype, narrow), model)
        if moving and model is not None:
            model.to(torch.float64).to(torch.bfloat16) if step else model.to("cpu")
            with torch.no_grad():
                model(torch.arange(8)[None])  # after which the outermost module keeps its parameters whole
            whole = [
                name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
            ]
            assert "lm_head.weight" in whole
        link.refit(verify=True)
        held.append(fingerprint(destination.module) if destination else None)
    expected = [fingerprint(vllm_on_cpu.build(hf, **engine)[0]) for hf in checkpoints] if destination else []
    return held, expected, link.describe()


def kept_memory(rank: int, sides: dict, mesh: dict[str, int], checkpoint: str) -> list[str]:
    """The parameters whose memory is still there when the model has been moved after a refit."""
    is_trainer, is_engine, members = start(rank, sides)
    model = sharded(checkpoint, mesh) if is_trainer else None
    destination = VllmModel(*vllm_on_cpu.build(checkpoint, load_format="dummy")) if is_engine else None
    link = connect(members, FsdpModel(model) if model is not None else None, destination)
    link.refit()
    if model is None:
        return []

    def memory() -> dict[str, StorageWeakRef]:
        return {
            name: StorageWeakRef(parameter.to_local().untyped_storage())
            for name, parameter in model.named_parameters()
        }

    with torch.no_grad():
        before = memory()
        assert not any(storage.expired() for storage in before.values())
        model.to(torch.float64)
        gc.collect()
        return [name for name, storage in before.items() if not storage.expired()]


def refused(rank: int, sides: dict, mesh: dict[str, int], checkpoint: str, what: str) -> str:
    """What a rank says at connect where something does not fit."""
    is_trainer, is_engine, members = start(rank, sides)

    def source() -> FsdpModel:
        model = sharded(checkpoint, mesh, torch.float16 if what == "dtype" else torch.bfloat16)
        if what == "config":
            model.config.rms_norm_eps = 0.5
        if what == "one too many":
            model.model.layers[0].self_attn.register_parameter(
                "adapter", torch.nn.Parameter(torch.zeros(4, 4))
            )
        if what == "elsewhere":
            model.model.layers[1].to_empty(device="meta")
        return FsdpModel(model)

    def destination() -> VllmModel:
        return VllmModel(*vllm_on_cpu.build(checkpoint, load_format="dummy"))

    return caught(
        lambda: connect(members, source if is_trainer else None, destination if is_engine else None)
    )
