"""Megatron-Core's own `dist_checkpointing`, of any version, as a program: what it loads of a
checkpoint, and what it saves of that.

    python tests/tools/core_checkpoint.py CHECKPOINT EXPECTED.safetensors SAVED

Loads every tensor of the torch_dist directory CHECKPOINT with Megatron-Core's loader, compares them
bit for bit with EXPECTED, and saves them again into SAVED/whole (one chunk each), SAVED/layers (one
chunk for each layer of a stacked tensor) and SAVED/flat (a key for each layer), as models of the
key schemes do. Prints the version, the number of tensors, and the names that differ. Needs torch,
megatron-core and safetensors; nothing of reshard.
"""

import json
import os
import queue
import re
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 asks for it when it is imported, GPU or not

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import load_file

STACKED = re.compile(r"(decoder\.layers|mtp\.layers)\.(?=[a-z])(.*)")


def load(directory: str) -> dict[str, torch.Tensor]:
    """Every tensor, whole, by Megatron-Core's loader."""
    found = dist_checkpointing.load_tensors_metadata(directory)
    wanted = {key: entry for key, entry in found.items() if isinstance(entry.dtype, torch.dtype)}
    state = dist_checkpointing.load(wanted, directory, validate_access_integrity=False)
    return {key: state[key] for key in wanted}


def saved_as(scheme: str, tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """The tensors as a model's ``sharded_state_dict`` would describe them."""
    state: dict[str, ShardedTensor] = {}
    for key, tensor in tensors.items():
        stacked = STACKED.fullmatch(key)
        if scheme == "whole" or stacked is None:
            state[key] = ShardedTensor.from_rank_offsets(key, tensor)
            continue
        for layer, part in enumerate(tensor):
            if scheme == "layers":
                offsets, options = [(0, layer, len(tensor))], {"prepend_axis_num": 1}
                state[f"{key} {layer}"] = ShardedTensor.from_rank_offsets(
                    key, part.contiguous(), *offsets, **options
                )
            else:
                name = f"{stacked[1]}.{layer}.{stacked[2]}"
                state[name] = ShardedTensor.from_rank_offsets(name, part.contiguous())
    return state


def without_gpu() -> None:
    """Saving waits for the GPU, and writes in a process of its own, which takes its results from a queue."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue = queue.Queue()
    filesystem_async.get_write_results_queue = lambda *_: results
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")


def main(checkpoint: str, expected: str, saved: str) -> None:
    without_gpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors, wanted = load(checkpoint), load_file(expected)
    differ = [key for key in tensors.keys() | wanted.keys()
              if key not in tensors or key not in wanted or not torch.equal(tensors[key], wanted[key])]  # fmt: skip
    for scheme in ("whole", "layers", "flat"):
        Path(saved, scheme).mkdir(parents=True)
        dist_checkpointing.save(saved_as(scheme, tensors), str(Path(saved, scheme)))
    from megatron.core import package_info

    print(
        json.dumps(
            {
                "core": package_info.__version__,
                "torch": metadata.version("torch"),
                "tensors": len(tensors),
                "differ": differ,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
