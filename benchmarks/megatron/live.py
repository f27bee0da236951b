"""A live Megatron loaded from disk, saved to it and exported: compared with mbridge, and with eight readers
and eight writers.

    torchrun --nproc-per-node 2 -m benchmarks.megatron.live --model qwen3-30b-a3b --layers 24 --tp 2 --ep 2
        --etp 1 --folder /dev/shm/live [--json FILE]

Every process holds a rank of a real Megatron model (Transformer Engine layers on a GPU, random
weights). In one run: save as ``torch_dist`` and as a Hugging Face directory; other weights; load
from each, after which every parameter must have its bits again; export to every rank; the same
three with mbridge where it is installed (`pip install --no-deps mbridge`). The floors are the same
files read by eight processes at once, and written by eight. Reported are seconds of the slowest
rank (medians of `rounds`), and for each what the slowest rank's GPU and this process's host memory
took more at their peak. With ``--disk`` the folder is on a disk: what is written is waited for, and
what is read has to come from there, ours and the floors' alike. With ``--loads`` only the loads are
measured: of several processes that hold the same, as replicas do, beside one.
"""

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from benchmarks.models import change, config_of, megatron_models, model_options
from benchmarks.processes import conclude, device, everyone, say, start_processes

BLOCK = 4 << 20


def read_file(path: str) -> int:
    """Read a file once, into one buffer."""
    buffer, count = bytearray(BLOCK), 0
    with open(path, "rb", buffering=0) as file:
        while found := file.readinto(buffer):
            count += found
    return count


def copy_part(part: tuple[str, str, bool]) -> int:
    """Write a file's bytes to another; with a third of True until they are on the disk."""
    count, buffer = 0, bytearray(BLOCK)
    with open(part[0], "rb", buffering=0) as source, open(part[1], "wb", buffering=0) as target:
        while found := source.readinto(buffer):
            count += target.write(memoryview(buffer)[:found])
        if part[2]:
            os.fsync(target.fileno())
    return count


def forget(folder: Path) -> None:
    """Have the system keep nothing of these files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def floors(folder: Path, aside: Path, disk: bool) -> dict[str, float]:
    """GB/s at which eight processes read a directory's large files, and copy them."""
    files = [str(path) for path in folder.rglob("*") if path.is_file() and path.stat().st_size > BLOCK]
    aside.mkdir()
    found = {}
    with ProcessPoolExecutor(8) as pool:
        list(pool.map(read_file, files[:8]))
        for name, run, jobs in (
            ("eight_readers", read_file, files),
            ("eight_copies", copy_part, [(path, str(aside / str(i)), disk) for i, path in enumerate(files)]),
        ):
            if disk and run is read_file:
                forget(folder)
            begin = time.perf_counter()
            count = sum(pool.map(run, jobs))
            found[f"{name}_gigabytes_per_second"] = count / (time.perf_counter() - begin) / 1e9
    shutil.rmtree(aside)
    return found


def measured(run: Callable[[], object], before: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median seconds of the slowest rank, and what the GPU and the host hold more at the peak."""
    times, gpu, host = [], 0, 0
    for _ in range(rounds):
        before()
        dist.barrier()
        if device() == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        run()
        if device() == "cuda":
            torch.cuda.synchronize()
            gpu = max(everyone(torch.cuda.max_memory_allocated() - held))
        times.append(max(everyone(time.perf_counter() - begin)))
        host = max(host, *everyone((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10))
    return {"seconds": statistics.median(times), "gpu_bytes": gpu, "host_bytes": host}


def fingerprint(models: list[torch.nn.Module], tp: int, vocabulary: int) -> list[int]:
    """A position-weighted sum of the bits (on the CPU a hash) of every parameter, without the
    vocabulary's padding, which is saved and loaded as zeros."""
    found = []
    for model in models:
        for name, parameter in model.named_parameters():
            held = parameter.detach()
            if "word_embeddings" in name or "output_layer" in name:
                held = held[: max(0, vocabulary - dist.get_rank() % tp * len(held))]
            if device() == "cpu":
                found.append(xxhash.xxh3_64_intdigest(held.contiguous().view(-1).view(torch.uint8).numpy()))
                continue
            words = held.contiguous().view(-1).view(torch.int16)
            total = 0
            for start in range(0, len(words), 1 << 26):
                piece = words[start : start + (1 << 26)].long()
                places = torch.arange(start, start + len(piece), device=piece.device) % 65521 + 1
                total += int((piece * places).sum())
            found.append(total)
    return found


def main() -> None:
    import reshard
    from reshard import MegatronLayout
    from reshard.trainers.megatron import MegatronModel

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_options(parser)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--disk", action="store_true", help="the folder is on a disk")
    parser.add_argument("--loads", action="store_true", help="measure loads alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_processes()
    first = dist.get_rank() == 0
    config = config_of(options.model, options.layers)
    layout = MegatronLayout(tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp)
    models = megatron_models(config, layout)
    change(MegatronModel(models), 0)
    begin = options.folder / "config"
    if first:
        import json

        begin.mkdir(parents=True)
        (begin / "config.json").write_text(json.dumps(config), encoding="utf-8")
    dist.barrier()
    size = 2 * sum(p.numel() for p in models[0].parameters())
    result: dict = {
        "model": options.model,
        "layers": config["num_hidden_layers"],
        "megatron": str(layout),
        "processes": dist.get_world_size(),
        "cores": len(os.sched_getaffinity(0)),
        "bytes_of_rank_0": size,
        "rounds": options.rounds,
    }
    vocabulary = config["vocab_size"]
    wanted = fingerprint(models, options.tp, vocabulary)
    places = {"torch_dist": options.folder / "mcore", "hf": options.folder / "hf"}
    for form, place in places.items():

        def save(form: str = form, place: Path = place) -> None:
            reshard.save(models, place, begin, format=form, overwrite=True, sync=options.disk)

        result[f"save {form}"] = measured(save, lambda: None, 1 if options.loads else options.rounds)
        say(form, result[f"save {form}"])
    result["bytes"] = sum(path.stat().st_size for path in places["hf"].rglob("*.safetensors"))
    for form, place in places.items():

        def spoil(place: Path = place) -> None:
            change(MegatronModel(models), 1)
            if options.disk and first:
                forget(place)

        result[f"load {form}"] = measured(
            lambda place=place: reshard.load(models, place), spoil, options.rounds
        )
        found = fingerprint(models, options.tp, vocabulary)
        result[f"load {form}"]["different"] = sum(
            everyone(sum(a != b for a, b in zip(wanted, found, strict=True)))
        )
        say("load", form, result[f"load {form}"])

    if not options.loads:
        exports(models, begin, options, result)
    if first:
        result |= floors(places["hf"], options.folder / "aside", options.disk)
        say({key: value for key, value in result.items() if "per_second" in key})
    dist.barrier()
    if not options.loads:
        rival(models, places["hf"], options.folder / "rival", result)
    dist.barrier()
    if first:
        shutil.rmtree(options.folder)
    conclude(result, options.json)


def exports(models: list[torch.nn.Module], config: Path, options: argparse.Namespace, result: dict) -> None:
    """Every tensor to every rank, in batches of two sizes, and as it lies where it lies whole."""
    import reshard

    for size, copy in ((1 << 30, True), (128 << 20, True), (128 << 20, False)):

        def export(size: int = size, copy: bool = copy) -> None:
            for _ in reshard.export(models, config, buffer_bytes=size, copy=copy):
                pass

        name = f"export, batches of {size >> 20} MiB{'' if copy else ', as it lies'}"
        result[name] = measured(export, lambda: None, options.rounds)
        say(name, result[name])


def rival(models: list[torch.nn.Module], source: Path, folder: Path, result: dict) -> None:
    """mbridge's load, save and export, once each."""
    try:
        from mbridge import AutoBridge
        from transformers import AutoConfig
    except ImportError:
        return
    bridge = AutoBridge.from_config(AutoConfig.from_pretrained(source))

    def export() -> None:
        for _ in bridge.export_weights(models):
            pass

    runs: dict[str, Callable[[], object]] = {
        "mbridge export": export,
        "mbridge load": lambda: bridge.load_weights(models, str(source)),
        "mbridge save": lambda: bridge.save_weights(models, str(folder)),
    }
    for name, run in runs.items():
        try:
            result[name] = measured(run, lambda: None, 1)
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"[:300]
        say(name, result[name])


if __name__ == "__main__":
    main()
