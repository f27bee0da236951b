"""Refits from an FSDP2 trainer, compared with what such trainers do today, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.refits.fsdp --model qwen3-30b-a3b --vllm-tp 2 [--tp 2] [--fp32] \\
        [--quantization fp8_per_block [--match-vllm-rounding]] [--json FILE]

Every process holds a rank of a transformers model under ``fully_shard`` (random weights in bf16, or
with `--fp32` in fp32, which all ways cast; with `--tp` on a mesh of shards and tensor parallelism)
and a rank of a real vLLM (`external_launcher`). Reported: connect, then warm medians of the slowest
rank for

- cuda_ipc: pulls from peers' memory; nccl: all bytes through NCCL; staged, with `--quantization`:
  through slabs, but for a process's own;
- full_tensor: ``full_tensor()`` of each parameter in turn, into vLLM's `load_weights`;
- gathered: the same with a GiB of parameters gathered at once, asynchronously.

Before the timing, all ways must leave the same bits in vLLM, from different garbage. With
`--quantization` vLLM quantizes what it loads, in the last two by its own reloading; where it serves
by DeepGEMM its bits are those of `--match-vllm-rounding`.
"""

import argparse
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.models import config_of, text_of, vllm_engine
from benchmarks.processes import conclude, device, everyone, say, start_processes
from benchmarks.refits.refit import fingerprints, link_rate, measured, memory_rate, reloading, scribble

COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def sharded(folder: Path, tp: int, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a config, sharded, with random weights that are the same on ranks that hold the same."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    has_tower = config.model_type == "qwen2_5_vl"
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_config(
            config, dtype=dtype
        )
    if has_tower:
        blocks = [*model.model.language_model.layers, *model.model.visual.blocks]
    else:
        blocks = model.transformer.h if config.model_type == "gpt2" else model.model.layers
    shape = (dist.get_world_size() // tp, tp)
    mesh = init_device_mesh(device(), shape, mesh_dim_names=("shard", "tp"))
    for layer in blocks:
        if tp > 1:
            linear = [n for n, module in layer.named_modules() if isinstance(module, torch.nn.Linear)]
            columns = {n: ColwiseParallel() for n in linear if n.endswith(COLWISE)}
            rows = {n: RowwiseParallel() for n in linear if n.endswith(ROWWISE)}
            parallelize_module(layer, mesh["tp"], columns | rows)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    model.to_empty(device=device())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        # With `--tp`, what is not split by it is whole on each of its ranks.
        rank = mesh.get_coordinate() if parameter.device_mesh.ndim == 2 else mesh.get_coordinate()[:1]
        torch.manual_seed(zlib.crc32(f"{name} {rank}".encode()))
        parameter.detach().to_local().normal_(1.0 if "norm" in name else 0.0, 0.02)
    return model


def published(model_type: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A whole parameter under the names that `load_weights` knows: experts, which transformers keeps in one
    tensor, each by itself, but for gpt-oss, whose checkpoints keep them so, too."""
    prefix, _, fused = name.rpartition(".")
    if fused not in ("gate_up_proj", "down_proj") or tensor.ndim < 3 or model_type == "gpt_oss":
        yield name, tensor
        return
    names = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    for expert, matrix in enumerate(tensor):
        for part, rows in zip(names, matrix.chunk(len(names)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", rows


def one_by_one(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield from published(model.config.model_type, name, parameter.detach().full_tensor())


def gathered(model: torch.nn.Module, at_once: int = 1 << 30) -> Iterator[tuple[str, torch.Tensor]]:
    """As `one_by_one`, with many gathers under way at a time."""
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        whole = parameter.detach().redistribute(
            placements=[Replicate()] * parameter.device_mesh.ndim, async_op=True
        )
        waiting.append((name, whole.to_local()))
        size += parameter.numel() * parameter.element_size()
        if size >= at_once:
            for each in waiting:
                yield from published(model.config.model_type, *each)
            waiting, size = [], 0
    for each in waiting:
        yield from published(model.config.model_type, *each)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--vllm-tp", type=int, required=True)
    parser.add_argument("--quantization", help="what vLLM serves in: fp8_per_block")
    parser.add_argument(
        "--match-vllm-rounding", action="store_true", help="quantize as vLLM's own loading does, bit for bit"
    )
    parser.add_argument("--moe-backend", help="vLLM's kernels of experts: gpt-oss is refitted with triton")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--today-rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_processes()
    config = config_of(options.model, options.layers)
    folder = Path(tempfile.gettempdir()) / f"{options.model}-{dist.get_rank()}"
    extra: dict[str, Any] = {"quantization": options.quantization} if options.quantization else {}
    if options.moe_backend:
        extra["moe_backend"] = options.moe_backend
    llm = vllm_engine(folder, config, tensor_parallel_size=options.vllm_tp, **extra)
    dtype = torch.float32 if options.fp32 else torch.bfloat16
    model = sharded(folder, options.tp, dtype)
    say("both are up")

    from reshard.engines import VllmModel
    from reshard.refit import RefitGroup, connect
    from reshard.trainers import FsdpModel

    cuda = device() == "cuda"
    result: dict = {
        "model": options.model,
        "layers": text_of(config)["num_hidden_layers"],
        "gpus": dist.get_world_size(),
        "tp": options.tp,
        "dtype": str(dtype),
        "vllm_tp": options.vllm_tp,
        "quantization": options.quantization,
        "match_vllm_rounding": options.match_vllm_rounding,
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "connect_seconds": {},
    }
    links = {}
    backends = ("cuda_ipc", "nccl", "staged") if options.quantization else ("cuda_ipc", "nccl")
    for backend in backends if cuda else ("nccl", "nixl"):
        dist.barrier()
        start = time.perf_counter()
        source, destination = (
            FsdpModel(model),
            VllmModel.from_llm(llm, match_vllm_rounding=options.match_vllm_rounding),
        )
        read = time.perf_counter()
        links[backend] = connect(
            RefitGroup.of_process_group(backend), source, destination, backend=backend, keep_mapped=True
        )
        result["connect_seconds"][backend] = {
            "read": read - start,
            "connect": time.perf_counter() - read,
        }
    module, model_config = destination.module, llm.llm_engine.model_config if options.quantization else None

    def load(parameters: Callable[[torch.nn.Module], Iterator]) -> None:
        with reloading(module, model_config):
            module.load_weights(parameters(model))

    ways = {name: partial(link.refit, verify=True) for name, link in links.items()}
    ways |= {"full_tensor": partial(load, one_by_one), "gathered": partial(load, gathered)}
    found = []
    for index, run in enumerate(ways.values()):
        scribble(destination, float(index + 3))
        run()
        found.append(fingerprints(module))
    different = [name for name in found[0] if len({one.get(name) for one in found}) > 1]
    result["parameters"], result["different"] = len(found[0]), max(everyone(len(different)))
    described = {name: link.describe() for name, link in links.items()}
    result["cast_bytes"] = {
        name: everyone([route["cast"] for route in d["routes"]]) for name, d in described.items()
    }
    result["parts"] = {name: everyone(d["parts"]) for name, d in described.items()}
    result["quantized"] = next(iter(described.values()))["quantized"]
    say("bits:", len(found[0]), "parameters and buffers; different:", different[:5])
    if cuda:
        [received] = [
            t.work.received_bytes for t in links["cuda_ipc"].transports if t.reach.name == "cuda_ipc"
        ]
        wire, memory = min(everyone(link_rate())), min(everyone(memory_rate()))
        moved = everyone((received["local"], received["cuda_ipc"]))
        result |= {"local_and_peer_bytes": moved, "link_bytes_per_second": wire}
        written = (1 if options.quantization else 2) / dtype.itemsize  # bytes for each that is read
        floors = (max(p / wire, (n + (n + p) * written) / memory) for n, p in moved)
        result["floor_seconds"] = max(floors)
    for name, link in links.items():
        reports = [link.refit() for _ in range(options.rounds)]
        for what in ("transfer_seconds", "total_seconds"):
            times = everyone([getattr(report, what) for report in reports])
            result[f"{name}_{what}"] = statistics.median(max(column) for column in zip(*times, strict=True))
    start = time.perf_counter()
    links["cuda_ipc" if cuda else "nccl"].refit(verify=True)
    result["verified_refit_seconds"] = max(everyone(time.perf_counter() - start))
    if cuda:
        for name in ("full_tensor", "gathered"):
            result[f"{name}_seconds"], result[f"{name}_extra_bytes"] = measured(
                ways[name], options.today_rounds
            )
    conclude(result, options.json)


if __name__ == "__main__":
    main()
