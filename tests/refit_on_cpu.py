"""Refits on the CPU: real Megatron models into vLLM's real model classes, several processes, the code path of the GPUs."""

import os
import tempfile
import zlib
from pathlib import Path

import torch
from megatron.core.transformer.module import Float16Module

from reshard.live.megatron import MegatronModel
from reshard.live.vllm import VllmModel
from reshard.refit import Members, connect
from tests import megatron_on_cpu, vllm_on_cpu


def trainer(flags: list[str], directory: str, wrapped: bool = True):
    """Megatron's chunks for this rank in bf16, loaded; and a function that loads another checkpoint into the same memory."""
    models, args = megatron_on_cpu.build(flags)
    for model in models:
        model.bfloat16()
    megatron_on_cpu.load(models, args, directory)
    chunks = [Float16Module(model.config, model) for model in models] if wrapped else models
    return chunks, lambda other: megatron_on_cpu.load(models, args, other)


def fingerprint(model: torch.nn.Module) -> dict[str, tuple]:
    """Shape, dtype and a checksum of the bits of every parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tuple(t.shape), str(t.dtype), zlib.crc32(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
                   if t.numel() else 0) for name, t in named}  # fmt: skip


def refit_twice(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, options: dict | None = None):
    """Refit from each of two Megatron checkpoints in turn.

    `sides` is {"trainer": n, "engine": m, "together": bool}; the engine starts with random weights. Returns, for engine ranks, what
    vLLM then holds and what its own loader makes of the two Hugging Face checkpoints, and whether an address has changed.
    """
    n, m, together, folder = sides["trainer"], sides["engine"], sides["together"], sides["folder"]
    is_trainer, index = rank < n, rank if together or rank < n else rank - n
    world = max(n, m) if together else (n if is_trainer else m)
    name = "all" if together else ("trainer" if is_trainer else "engine")
    os.environ.update(RANK=str(index), WORLD_SIZE=str(world), LOCAL_RANK=str(index))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=index, world_size=world)
    source = destination = load = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1])
        source = MegatronModel(chunks)
    if together or not is_trainer:
        model, config = vllm_on_cpu.build(checkpoints[0][0], load_format="dummy", **engine)
        destination = VllmModel(model, config)
    if together:
        members = Members.of_process_group(timeout=60)
    else:
        members = Members(torch.distributed.FileStore(f"{folder}/members", n + m), rank, n + m, timeout=60)
    link = connect(members, source, destination, **(options or {}))
    addresses = {name: t.data_ptr() for name, t in destination.tensors.items()} if destination else {}
    held, reports = [], []
    for step, (_, mcore) in enumerate(checkpoints):
        if step and load is not None:
            load(mcore)
        reports.append(link.refit(version=10 + step, verify=True).to_dict())
        held.append(fingerprint(destination.module) if destination else None)
    moved = [name for name, t in (destination.tensors.items() if destination else ()) if t.data_ptr() != addresses[name]]
    expected = []
    if destination is not None:
        for hf, _ in checkpoints:
            reference, _ = vllm_on_cpu.build(hf, **engine)
            expected.append(fingerprint(reference))
    return held, expected, moved, reports, link.version


def new_folder() -> str:
    """A place for the ranks to meet."""
    return str(Path(tempfile.mkdtemp()))
