"""How fast is a refit? Compared with the link, with memory, and with what trainers do today, in one run.

    torchrun --nproc-per-node 4 -m benchmarks.refits.refit --model qwen3-30b-a3b --tp 2 --ep 4 --etp 1 --vllm-tp 4
        [--json FILE]

Every process holds a rank of a real Megatron model (Transformer Engine layers, random weights) and a rank of
a real vLLM (`external_launcher`). Reported: connect, then warm medians of the slowest rank for

- cuda_ipc: pulls from peers' memory; nccl: all bytes through NCCL; nixl: all through NIXL, where it is installed;
- today: every rank gathers every full Hugging Face tensor, layer by layer, and gives it to vLLM's
  `load_weights`;
- mbridge, where it is installed (`pip install --no-deps mbridge`): its `export_weights` alone, and into
  `load_weights`;

next to the floors: the bytes that a rank must fetch from peers over the measured rate of one large peer copy
on all ranks at once, and the bytes that its memory must read and write over the measured rate of a copy.
Megatron's linear attention (Qwen3-Next, Qwen3.5) needs flash-linear-attention on a GPU.

Before the timing, the three ways must leave the same bits in vLLM, from different garbage.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.processes import conclude, device, everyone, say


def used_bytes() -> int:
    """Memory of this GPU in use, whoever uses it."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def fingerprint(tensor: torch.Tensor) -> int:
    """A position-weighted sum of the bits of a tensor."""
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1).view(word)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 1 << 26):
        piece = flat[start : start + (1 << 26)].long()
        total += (piece * (torch.arange(start, start + len(piece), device=flat.device) % 65521 + 1)).sum()
    return int(total)


def fingerprints(model: torch.nn.Module) -> dict[str, int]:
    """A fingerprint of every parameter and buffer."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: fingerprint(tensor) for name, tensor in tensors if tensor.numel()}


def scribble(engine, value: float) -> None:
    """Fill everything that a refit writes with one value."""
    for tensor in engine.written_tensors():
        tensor.detach().fill_(value)


def link_rate(n: int = 1 << 30) -> float:
    """Bytes a second and GPU of one large copy of n bytes from the neighbor's memory, all GPUs at
    once; infinite where there is none."""
    if dist.get_world_size() == 1:
        return float("inf")
    from reshard.device.cuda import allocation_of, driver, exported
    from reshard.refit.transports.mapped import MappedMemory

    shared, here = (torch.empty(n, dtype=torch.uint8, device="cuda") for _ in range(2))
    base = allocation_of(shared.data_ptr()).base
    handle, offset = everyone((exported(base), shared.data_ptr() - base))[
        (dist.get_rank() + 1) % dist.get_world_size()
    ]
    mappings = MappedMemory(shared.device)
    there = mappings.address(handle, n, "the neighbor") + offset
    stream = torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(6):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            assert not driver().cuMemcpyDtoDAsync(here.data_ptr(), there, n, stream)[0]
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 4)
    slowest = [max(column) for column in zip(*everyone(times), strict=True)]
    dist.barrier()
    mappings.close()
    return n / statistics.median(slowest)


def memory_rate() -> float:
    """Bytes a second, read and written, of a copy within this GPU."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            b.copy_(a)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 4)
    return 2 * (1 << 30) / statistics.median(times)


@contextmanager
def reloading(vllm_model, model_config=None):
    """Within it weights go into vLLM's model: with a `model_config` by vLLM's own reloading, which
    quantizes each layer when it has all of it."""
    if model_config is None:
        yield
        return
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(vllm_model)
    yield
    layerwise.finalize_layerwise_reload(vllm_model, model_config)


class Today:
    """Gather every full tensor on every rank, layer by layer, then vLLM's own loader; with a
    `model_config` by vLLM's own reloading, which quantizes each layer when it has all of it."""

    def __init__(self, source, model, vllm_model, model_config=None) -> None:
        from reshard.core.dtypes import dtype_named
        from reshard.megatron.parameters import expand
        from reshard.refit.planning import Sources
        from reshard.refit.protocol.held import HeldTensors

        self.source, self.module, self.model_config = source, vllm_model, model_config
        self.shapes = expand(model).shapes
        held = HeldTensors(
            source.publish(model), [dtype_named(str(region.tensor.dtype)).name for region in source.memory]
        )
        ranks = dict(enumerate(everyone(held)))
        self.whole = Sources.of(ranks, set(self.shapes), {rank: f"rank {rank}" for rank in ranks})
        by_layer: dict = {}
        for tensor in self.whole.tensors:
            names = [part.name for part in tensor.parts]
            layer = names[0].split(".")[2] if names[0].startswith("model.layers.") else names[0]
            by_layer.setdefault(layer, []).append(tensor)
        self.layers = list(by_layer.values())
        self.give = lambda full: self.module.load_weights(iter(full.items()))

    def run(self) -> None:
        with reloading(self.module, self.model_config):
            self._give_all()

    def _give_all(self) -> None:
        me = dist.get_rank()
        for tensors in self.layers:
            gathered, work = {}, []
            for tensor in tensors:
                rank, index = self.whole.holders[tensor.id][0]
                if rank == me:
                    region = self.source.memory[index]
                    # Of more than two dims, as a convolution's, the rest are the columns.
                    matrix = (tensor.shape[0], math.prod(tensor.shape[1:]))
                    start = region.tensor.storage_offset() + region.offset
                    rows = region.tensor.detach().as_strided(matrix, (region.pitch, 1), start)
                    here = rows.contiguous().view(tensor.shape)
                else:
                    here = torch.empty(
                        tensor.shape,
                        dtype=getattr(torch, self.whole.dtypes[tensor.parts[0].name]),
                        device=device(),
                    )
                work.append(dist.broadcast(here, rank, async_op=True))
                gathered[tensor.id] = here
            for w in work:
                w.wait()
            full: dict[str, torch.Tensor] = {}
            for tensor in tensors:
                for part in tensor.parts:
                    if part.name not in full:
                        full[part.name] = torch.empty(
                            self.shapes[part.name], dtype=gathered[tensor.id].dtype, device=device()
                        )
                    at = tuple(
                        slice(o, o + n) for o, n in zip(part.box.offsets, part.box.lengths, strict=True)
                    )
                    there = tuple(slice(o, o + n) for o, n in zip(part.at, part.box.lengths, strict=True))
                    full[part.name][at] = gathered[tensor.id][there]
            self.give(full)


class Exported:
    """`reshard.export` on every rank, into vLLM's own loader: for families of which Megatron holds tensors
    in another order or dtype than they are published in."""

    def __init__(self, models: list, folder: Path, vllm_model) -> None:
        self.models, self.folder, self.module = models, folder, vllm_model

    def run(self) -> None:
        from reshard import export

        self.module.load_weights(export(self.models, self.folder))


def relative_error(engine, source) -> float:
    """Of the first quantized tensors that this rank's trainer has whole: the root mean square of
    what they differ from their bf16, relative to it."""
    from reshard.quantization.fp8_blocks import BLOCK

    published = zip(source.publish(engine.model), source.memory, strict=True)
    held = {part.name: (region, part) for tensor, region in published for part in tensor.parts}
    wrong = size = 0.0
    for identity, scales in list(engine.scales.items())[:400]:
        tensor, codes = engine.placement.tensors[identity], engine.regions[identity]
        rows, columns = tensor.shape
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        numbers = codes.tensor.as_strided(
            (rows, columns), (codes.pitch, 1), codes.tensor.storage_offset() + codes.offset
        )
        where = scales.region
        factors = where.tensor.as_strided(
            (down, across), (where.pitch, 1), where.tensor.storage_offset() + where.offset
        )
        spread = factors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        values = numbers.float() * spread
        for part in tensor.parts:
            region, mine = held.get(part.name, (None, None))
            if mine is None or mine.box != part.box:
                continue
            (row, column), (n, m) = part.at, part.box.lengths
            (its_row, its_column) = mine.at
            offset = region.tensor.storage_offset() + region.offset + its_row * region.pitch + its_column
            bf16 = region.tensor.detach().as_strided((n, m), (region.pitch, 1), offset).float()
            wrong += float((values[row : row + n, column : column + m] - bf16).double().square().sum())
            size += float(bf16.double().square().sum())
    return (wrong / size) ** 0.5 if size else float("nan")


def measured(run: Callable[[], object], rounds: int) -> tuple[float, int]:
    """Median seconds of the slowest rank, and the most memory that torch took more, in the last round."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, start = torch.cuda.memory_allocated(), time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(max(everyone(time.perf_counter() - start)))
        extra = max(everyone(torch.cuda.max_memory_allocated() - held))
    return statistics.median(times), extra


def rival(models, folder: Path, module, rounds: int, found: dict) -> None:
    """mbridge's way: seconds of its export alone and with vLLM's loader, memory, and whether the bits are the
    same afterward."""
    try:
        from mbridge import AutoBridge
        from transformers import AutoConfig
    except ImportError:
        return
    before = fingerprints(module)
    bridge = AutoBridge.from_config(AutoConfig.from_pretrained(folder))

    def export() -> None:
        for _ in bridge.export_weights(models):
            pass

    for name, run in {
        "mbridge_export": export,
        "mbridge": lambda: module.load_weights(bridge.export_weights(models)),
    }.items():
        found[f"{name}_seconds"], found[f"{name}_extra_bytes"] = measured(run, rounds)
    after = fingerprints(module)
    found["mbridge_different"] = max(everyone(sum(before[name] != after[name] for name in before)))


def main() -> None:
    from benchmarks.models import config_of, megatron_models, model_options, text_of, vllm_engine
    from benchmarks.processes import start_processes
    from reshard import MegatronLayout, ReshardError

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_options(parser)
    parser.add_argument("--vllm-tp", type=int, required=True)
    parser.add_argument("--vllm-ep", action="store_true")
    parser.add_argument("--quantization", help="what vLLM serves in: fp8_per_block")
    parser.add_argument(
        "--match-vllm-rounding", action="store_true", help="quantize as vLLM's own loading does, bit for bit"
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="unmap the trainer's memory after each refit, as connect does by default",
    )
    parser.add_argument(
        "--export", action="store_true", help="as today's way, reshard's export into vLLM's loader"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--today-rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_processes()
    config, layout = (
        config_of(options.model, options.layers),
        MegatronLayout(tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp),
    )
    start = time.perf_counter()
    extra = {"enable_expert_parallel": True} if options.vllm_ep else {}
    if options.quantization:
        extra["quantization"] = options.quantization
    folder = Path(tempfile.gettempdir()) / f"{options.model}-{dist.get_rank()}"
    llm = vllm_engine(folder, config, tensor_parallel_size=options.vllm_tp, **extra)
    say(f"vLLM started in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    models = megatron_models(config, layout)
    say(
        f"Megatron built in {time.perf_counter() - start:.1f} s; "
        f"{torch.cuda.memory_allocated() / 1e9:.1f} GB in use"
    )
    from benchmarks.models import change
    from reshard.engines.vllm.live import VllmModel
    from reshard.refit import RefitGroup, connect
    from reshard.refit.copying.addresses import COLUMN_COUNT, ROW_COUNT
    from reshard.trainers.megatron import MegatronModel

    change(MegatronModel(models), 0)
    result: dict = {
        "model": options.model,
        "layers": text_of(config)["num_hidden_layers"],
        "megatron": str(layout),
        "gpu": torch.cuda.get_device_name(),
        "vllm": f"TP{options.vllm_tp}" + (" EP" if options.vllm_ep else ""),
        "gpus": dist.get_world_size(),
        "keep_mapped": not options.release,
    }
    links, seconds = {}, {}
    for backend in ("cuda_ipc", "nccl", "nixl"):
        torch.cuda.synchronize()
        dist.barrier()
        before, start = used_bytes(), time.perf_counter()
        source = MegatronModel(models)
        read = time.perf_counter()
        destination = VllmModel.from_llm(llm, options.match_vllm_rounding)
        traced = time.perf_counter()
        try:
            links[backend] = connect(
                RefitGroup.of_process_group(backend),
                source,
                destination,
                backend=backend,
                keep_mapped=not options.release,
            )
        except ReshardError as error:
            if backend == "cuda_ipc":
                raise
            say(f"{backend}: {error}")  # blocks of which several ranks hold parts
            continue
        connected = time.perf_counter()
        seconds[backend] = {
            "read_megatron": round(read - start, 3),
            "trace_vllm": round(traced - read, 3),
            "connect": round(connected - traced, 3),
        }
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        links[backend].refit()
        torch.cuda.synchronize()
        result[f"{backend}_extra_bytes"] = max(
            everyone(
                used_bytes()
                - before
                + torch.cuda.max_memory_reserved()
                - max(held, torch.cuda.memory_reserved())
            )
        )
    start = time.perf_counter()
    again = connect(
        RefitGroup.of_process_group("again"), source, destination, backend="cuda_ipc", keep_mapped=True
    )
    seconds["again, the same two"] = {"connect": round(time.perf_counter() - start, 3)}
    again.close()
    result["connect_seconds"] = seconds
    say(json.dumps(seconds))
    module, model = destination.module, destination.model
    today = (
        Exported(models, folder, module)
        if options.export
        else Today(source, model, module, llm.llm_engine.model_config if options.quantization else None)
    )
    found, served = {}, {}
    ways = {name: link.refit for name, link in links.items()} | {"today": today.run}
    for index, (name, run) in enumerate(ways.items()):
        scribble(destination, float(index + 3))
        run()
        torch.cuda.synchronize()
        found[name] = fingerprints(module)
        addresses = served.setdefault("addresses", destination.tensor_addresses())
        result[f"{name}_moved"] = sum(
            a != b for a, b in zip(addresses, destination.tensor_addresses(), strict=True)
        )
        if options.quantization:
            result[f"{name}_error"] = relative_error(destination, source)
    different = sorted(n for n in found["today"] if len({found[way].get(n) for way in ways}) > 1)
    result["parameters"], result["different"] = len(found["today"]), max(everyone(len(different)))
    of_links = sorted(n for n in found["today"] if len({found[way].get(n) for way in links}) > 1)
    result["different_by_backend"] = max(everyone(len(of_links)))
    say("bits:", result["parameters"], "parameters and buffers;", "different:", different[:5], of_links[:5])
    try:
        start = time.perf_counter()
        links["cuda_ipc"].refit(verify=True)  # makes the tables, and compiles
        result["first_verified_refit_seconds"] = max(everyone(time.perf_counter() - start))
        result["verified_refit_seconds"], _ = measured(lambda: links["cuda_ipc"].refit(verify=True), 5)
    except Exception as error:
        result["verify_error"] = str(error)
        raise
    link = links["cuda_ipc"]
    [reading] = [transport for transport in link.transports if transport.reach.name == "cuda_ipc"]
    result |= {
        "local_bytes": everyone(reading.work.received_bytes["local"]),
        "peer_bytes": everyone(reading.work.received_bytes["cuda_ipc"]),
        "launches": reading.work.launches,
    }
    wire, memory = min(everyone(link_rate())), min(everyone(memory_rate()))
    sent = [0] * dist.get_world_size()
    for rank, pieces in link.receiver.pieces.items():
        if rank != dist.get_rank():
            sent[rank] += 2 * int((pieces.requests[:, ROW_COUNT] * pieces.requests[:, COLUMN_COUNT]).sum())
    out = [sum(column) for column in zip(*everyone(sent), strict=True)]
    result |= {"link_bytes_per_second": wire, "memory_bytes_per_second": memory, "sent_bytes": out}
    result["wire_floor_seconds"] = max(max(result["peer_bytes"]), max(out)) / wire
    result["memory_floor_seconds"] = (
        max(2 * a + b + c for a, b, c in zip(result["local_bytes"], result["peer_bytes"], out, strict=True))
        / memory
    )
    floor = max(result["wire_floor_seconds"], result["memory_floor_seconds"])
    for backend, link in links.items():
        reports = [link.refit() for _ in range(options.rounds)]
        for what in ("wait_seconds", "transfer_seconds", "total_seconds"):
            slowest = [
                max(column) for column in zip(*everyone([getattr(r, what) for r in reports]), strict=True)
            ]
            result[f"{backend}_{what}"] = statistics.median(slowest)
        result[f"{backend}_ratio_to_floor"] = result[f"{backend}_transfer_seconds"] / floor
    result["today_seconds"], result["today_extra_bytes"] = measured(today.run, options.today_rounds)
    try:
        rival(models, folder, module, options.today_rounds, result)
    except Exception:
        result["mbridge_error"] = traceback.format_exc()[-1200:]
    result["today_over_peer"] = result["today_seconds"] / result["cuda_ipc_total_seconds"]
    conclude(result, options.json)


if __name__ == "__main__":
    main()
