"""How fast is a conversion, and what does it cost? Compared with `cp -r` of the same bytes and with
Megatron-Core's own save.

    python -m benchmarks.storage.convert --folder DIR --gigabytes 2 4 --families qwen3-moe llama --rounds 3
        [--json FILE]

For each family and size: a checkpoint of real shapes (hidden sizes, heads and experts of Qwen3-30B-A3B and of
Llama-3.1-8B; as many layers as the size allows) with random bytes. Then, alternating, `rounds` times:

- `cp -r` of the Hugging Face directory, `reshard hf-to-mcore` and `reshard mcore-to-hf`, as commands:
  start-up included, and once with
  all bytes on the disk at the end (`sync` after `cp`), once without waiting for it;
- at the end, Megatron-Core's own `dist_checkpointing.save` of the same model, built and filled on the CPU.

Reported: medians, ratios to `cp` of the same run, peak anonymous memory of all processes together (Pss_Anon
of /proc/PID/smaps_rollup, sampled), start-up of `reshard --help`, and where the time of a conversion goes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
FAMILIES = {
    "qwen3-moe": QWEN3_MOE,
    # 1.5 MB a tensor
    "small-experts": QWEN3_MOE | {"vocab_size": 8192, "moe_intermediate_size": 384},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}
LAYOUTS = {
    "qwen3-moe": ["--tp", "2", "--pp", "2", "--ep", "4", "--etp", "1"],
    "small-experts": ["--tp", "2", "--ep", "4", "--etp", "1"],
    "llama": ["--tp", "4", "--pp", "2"],
}


def make(folder: Path, family: str, size_bytes: int) -> int:
    """Write a checkpoint of about `size_bytes`; its bytes."""
    import numpy as np

    from reshard.core.dtypes import DTYPES
    from reshard.formats import safetensors
    from reshard.megatron.parameters import expand
    from reshard.models.model import Model

    def shapes(layers: int) -> dict:
        return expand(Model.from_hf(FAMILIES[family] | {"num_hidden_layers": layers})).shapes

    def total(layers: int) -> int:
        return sum(2 * int(np.prod(s)) for n, s in shapes(layers).items() if not n.endswith("inv_freq"))

    layers = 2
    while total(layers + 2) <= size_bytes:
        layers += 2
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(FAMILIES[family] | {"num_hidden_layers": layers}, indent=2), encoding="utf-8"
    )
    files = safetensors.plan_files({n: (DTYPES["bfloat16"], s) for n, s in shapes(layers).items()}, 4 * 10**9)
    # Bytes of normal numbers of magnitude 2**-14 .. 2, drawn once and shifted, so that making them takes no
    # time.
    noise = np.random.default_rng(0).integers(0x3880, 0x4000, 1 << 22, dtype=np.uint16).tobytes()
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(file.head)
            for i, tensor in enumerate(file.tensors.values()):
                left, shift = tensor.size_bytes, (i * 1009) % (1 << 20) * 2
                while left:
                    piece = noise[shift : shift + left]
                    out.write(piece)
                    left -= len(piece)
    index = safetensors.index_json(files)
    if index:
        (folder / safetensors.INDEX).write_text(index, encoding="utf-8")
    return sum(f.size_bytes for f in files)


def anonymous_bytes(root: int, kinds: tuple[str, ...] = ("Pss_Anon:",)) -> int:
    """Proportional anonymous memory of a process and all that it started; of other `kinds` as the kernel names them."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, parent = int(status.parent.name), int(status.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(pid)
        except (OSError, ValueError):
            continue
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))
        except OSError:
            continue
    return total


def timed(command: list[str], memory: bool = True) -> tuple[float, int]:
    """Seconds and, with `memory`, peak anonymous bytes of a command and its children's; it must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while memory and not ended.wait(0.05):
            peak[0] = max(peak[0], anonymous_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    assert status == 0, command
    return seconds, peak[0]


def settle(source: Path) -> None:
    """Give every timed command the same start, whatever ran before it.

    Earlier writes are on the disk, caches are empty, and a source of at most a sixth of the memory is read
    into them. The memory that the command's output will be cached in has just been in use: on a virtual
    machine, pages that the host has taken back cost several times as much as writing them, and would be
    charged to whoever comes last.
    """
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="utf-8")
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    small = size < memory / 6
    if small:
        subprocess.run(f"cat {source}/*.* {source}/*/*.distcp > /dev/null 2>&1", shell=True)
    touch = min(2 * size, int(memory * 0.6))
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import mmap; m = mmap.mmap(-1, {touch}); b = bytes(1 << 20)\nfor _ in "
            f"range({touch >> 20}): m.write(b)",
        ]
    )


def megatron_save(source: Path, target: Path) -> dict:
    """Build the model with Megatron-Core on the CPU, fill it, save it with its own code; seconds of each part
    and peak memory."""
    code = f"""
import sys, json, time, resource
from pathlib import Path
if __name__ == "__main__":
    import torch
    from tests.on_cpu import megatron_on_cpu as megatron
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    lines = Path({str(target / "ours" / "megatron_flags.txt")!r}).read_text(encoding="utf-8").splitlines()
    flags = [f for line in lines
             if not line.startswith(("--tensor-model", "--pipeline-model", "--expert-", "--bf16"))
             for f in line.split()]
    torch.nn.init.normal_ = torch.nn.init.xavier_normal_ = lambda t, *a, **k: t
    import megatron.core.tensor_parallel.layers as layers
    layers._initialize_affine_weight_cpu = lambda weight, *a, **k: None
    start = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16)
    models, args = megatron.build([*flags, "--bf16"])
    for model in models: model.bfloat16()
    built = time.perf_counter()
    megatron.load(models, args, {str(target / "ours")!r})
    loaded = time.perf_counter()
    (Path({str(target)!r}) / "theirs").mkdir()
    megatron.save(models, {str(target / "theirs")!r})
    saved = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(dict(build=built - start, load=loaded - built, save=saved - loaded, peak_rss_bytes=peak)))
"""
    script = target / "save.py"
    script.write_text(code, encoding="utf-8")
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                                "PYTHONPATH": str(REPOSITORY)}  # fmt: skip
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def profile(source: Path, target: Path) -> dict[str, float]:
    """Where the time of hf-to-mcore goes: seconds summed over workers (as threads), by what they do."""
    code = f"""
import sys, time, json, threading
start = time.perf_counter()
import reshard.storage.convert as c
from reshard.storage.destinations import megatron as destinations, rank_files
from reshard.storage.io import files
from reshard.storage.run import conversion, workers
workers.can_fork = lambda: False
spent, lock = dict(imports=time.perf_counter() - start), threading.Lock()
def clock(owner, name, label):
    plain = getattr(owner, name)
    def timed(*a, **k):
        t = time.perf_counter()
        try: return plain(*a, **k)
        finally:
            with lock: spent[label] = spent.get(label, 0) + time.perf_counter() - t
    setattr(owner, name, timed)
clock(files.OpenFiles, "read_into", "read"); clock(files.OpenFiles, "write", "write")
clock(files.OpenFiles, "sync", "fsync (waits of 4 threads)")
clock(destinations, "make_plan", "plan and proof"); clock(destinations, "chunks_to_write", "chunks")
clock(c, "HuggingFaceSource", "open source")
clock(rank_files.RankFiles, "metadata", ".metadata"); clock(conversion, "copy_tensor", "streams (all of a tensor)")
c.hf_to_mcore({str(source)!r}, {str(target)!r}, c.MegatronLayout(tp=4, pp=2))
spent["wall"] = time.perf_counter() - start
print(json.dumps(spent))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {key: round(value, 3) for key, value in json.loads(done.stdout).items()}


def measure(folder: Path, family: str, gigabytes: float, rounds: int, megatron: bool) -> dict:
    work = folder / f"{family}-{gigabytes:g}"
    shutil.rmtree(work, ignore_errors=True)
    size = make(work / "hf", family, int(gigabytes * 10**9))
    reshard = [sys.executable, "-m", "reshard.cli.main"]
    source, mcore, out = work / "hf", work / "mcore", work / "out"
    convert = [*reshard, "hf-to-mcore", str(source), str(out), *LAYOUTS[family]]
    back = [*reshard, "mcore-to-hf", str(mcore), str(out)]
    commands = {
        "cp": (source, ["bash", "-c", f"cp -r {source} {out} && sync {out}/*"]),
        "hf-to-mcore": (source, convert),
        "mcore-to-hf": (mcore, back),
        "cp, not synced": (source, ["cp", "-r", str(source), str(out)]),
        "hf-to-mcore, not synced": (source, [*convert, "--no-sync"]),
        "mcore-to-hf, not synced": (mcore, [*back, "--no-sync"]),
    }
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
    out.rename(mcore)
    subprocess.run([*reshard, "diff", str(source), str(mcore)], check=True, stdout=subprocess.DEVNULL)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    for _ in range(rounds):
        for name, (reads, command) in commands.items():
            settle(reads)
            spent, peak = timed(command)
            seconds.setdefault(name, []).append(spent)
            memory[name] = max(memory.get(name, 0), peak)
            shutil.rmtree(out)
    shutil.rmtree(mcore)
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    result = {
        "family": family,
        "bytes": size,
        "seconds": medians,
        "all_seconds": {n: [round(s, 3) for s in v] for n, v in seconds.items()},
        "ratio_to_cp": {n: round(medians[n] / medians["cp"], 3) for n in ("hf-to-mcore", "mcore-to-hf")},
        "ratio_to_cp_not_synced": {
            n: round(medians[f"{n}, not synced"] / medians["cp, not synced"], 3)
            for n in ("hf-to-mcore", "mcore-to-hf")
        },
        "peak_anonymous_bytes": {n: memory[n] for n in ("hf-to-mcore", "mcore-to-hf")},
    }
    if megatron:
        subprocess.run(
            [*convert[: -len(LAYOUTS[family]) - 1], str(work / "ours"), "--transformer-impl", "local"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        settle(work / "ours")
        result["megatron_core"] = megatron_save(source, work)
        shutil.rmtree(work / "ours")
    settle(source)
    result["where_the_time_goes"] = profile(source, work / "profile")
    shutil.rmtree(work)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[2.0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--megatron-up-to",
        type=float,
        default=0,
        help="gigabytes up to which to run Megatron-Core's own save (in memory)",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling every module at every start is no user's lot
    help_seconds = [timed([sys.executable, "-m", "reshard.cli.main", "--help"])[0] for _ in range(5)]
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    results: dict = {
        "command": " ".join(sys.argv),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "help_seconds": round(statistics.median(help_seconds), 3),
        "runs": [],
    }
    print(json.dumps(results))
    for family in options.families:
        for gigabytes in options.gigabytes:
            result = measure(
                options.folder, family, gigabytes, options.rounds, gigabytes <= options.megatron_up_to
            )
            print(json.dumps(result, indent=1), flush=True)
            results["runs"].append(result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
