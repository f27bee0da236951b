"""How does a conversion use many cores? Compared with `cp -r` and eight `cp` at once, with all files in
memory.

    python -m benchmarks.storage.cores --folder /dev/shm/bench --gigabytes 31 --cores 1 2 4 8 16 32 [--json FILE]
    python -m benchmarks.storage.cores --folder /dev/shm/bench --deepseek 6 --thrown-away --cores 32 [--json FILE]

The first makes a checkpoint of Qwen3-30B-A3B's shapes with as many layers as fit, and runs both directions,
`diff` and `check` as commands (start included, without waiting for a disk) at their default settings,
`rounds` times in turn with the copies, then once on each number of cores (``taskset``). The second makes a
checkpoint of DeepSeek-V3's shapes with that many layers, in the published fp8 blocks, and converts it to bf16
at TP8 EP8; with `--thrown-away` also one of all 61 layers to TP8 PP16 EP8, whose source is files with holes
(which read as zeros) and whose output goes nowhere.

Reported: GB/s of what is written (of `diff` and `check`: read of one side), medians; the largest sum of the
processes' proportional anonymous memory (Pss_Anon of /proc/PID/smaps_rollup); whether the manifests of all
runs are the same.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.models import MODELS
from benchmarks.storage import convert
from benchmarks.storage.convert import FAMILIES
from reshard.core.dtypes import DTYPES
from reshard.formats import safetensors
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.storage.io.streams import TensorInfo
from reshard.storage.quantized import Quantized

RESHARD = [sys.executable, "-m", "reshard.cli.main"]
QWEN = ["--tp", "2", "--pp", "2", "--ep", "4", "--etp", "1"]
# The same commands, whose bytes of tensors go nowhere.
THROWN_AWAY = """
import sys
from reshard.storage.io.files import OpenFiles
from reshard.storage.run.workdir import Workdir
from reshard.cli.main import main
Workdir.space = lambda self, sizes: (0, 0)
OpenFiles.write = lambda self, path, offset, *data: None
sys.argv[0] = "reshard"
main()
"""


def planned(config: dict, fp8: bool) -> list[safetensors.NewFile]:
    """The files of a checkpoint of this config."""
    model = Model.from_hf(config)
    shapes = {n: s for n, s in expand(model).shapes.items() if not n.endswith("inv_freq")}
    tensors = {n: TensorInfo(s, DTYPES["bfloat16"]) for n, s in shapes.items()}
    blocks = Quantized(model.quantizable() & tensors.keys() if fp8 else ())
    stored: dict = {}
    for name, info in tensors.items():
        stored |= blocks.stored(name, info)
    return safetensors.plan_files(stored, 4_300_000_000)


def fill(path: Path, file: safetensors.NewFile) -> None:
    """Write a file with random finite numbers, drawn once and shifted."""
    generator = np.random.default_rng(0)
    noise = {
        "bfloat16": generator.integers(0x3880, 0x4000, 1 << 22, dtype=np.uint16).tobytes(),
        "float8_e4m3fn": generator.integers(0, 0x7F, 1 << 23, dtype=np.uint8).tobytes(),
        "float32": (generator.random(1 << 21, np.float32) * 1e-3).tobytes(),
    }
    with open(path, "wb") as out:
        out.write(file.head)
        for index, tensor in enumerate(file.tensors.values()):
            left, shift = tensor.size_bytes, index * 1009 % (1 << 18) * 4
            while left:
                left -= out.write(noise[tensor.dtype.name][shift : shift + left])


def make(folder: Path, config: dict, fp8: bool = False, holes: bool = False) -> int:
    """A checkpoint with random weights, or of files with holes; its bytes."""
    folder.mkdir(parents=True)
    if fp8:
        config = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files = planned(config, fp8)
    if holes:
        for file in files:
            with open(folder / file.name, "wb") as out:
                out.write(file.head)
                out.truncate(file.size_bytes)
    else:
        with ProcessPoolExecutor(8) as pool:
            list(pool.map(fill, [folder / file.name for file in files], files))
    index = safetensors.index_json(files)
    if index:
        (folder / safetensors.INDEX).write_text(index, encoding="utf-8")
    return sum(file.size_bytes for file in files)


def qwen(size_bytes: int) -> dict:
    """Qwen3-30B-A3B with as many layers as `size_bytes` take."""
    layers = 2
    while True:
        config = FAMILIES["qwen3-moe"] | {"num_hidden_layers": layers + 2}
        if sum(2 * int(np.prod(s)) for s in expand(Model.from_hf(config)).shapes.values()) > size_bytes:
            return FAMILIES["qwen3-moe"] | {"num_hidden_layers": layers}
        layers += 2


def timed(command: list[str], cores: int, memory: bool = False) -> tuple[float, int]:
    """Seconds and peak anonymous memory of a command on so many cores. It must succeed."""
    return convert.timed(["taskset", "-c", f"0-{cores - 1}", *command], memory)


def touch(size_bytes: int) -> None:
    """Use as much memory once: a virtual machine may get it from its host only then."""
    code = (
        f"import mmap\nm = mmap.mmap(-1, {size_bytes // 16})\nb = bytes(1 << 20)\nfor _ in "
        f"range({size_bytes // 16 >> 20}): m.write(b)"
    )
    for process in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(16)]:
        assert process.wait() == 0


def manifest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "reshard.json").read_bytes()).hexdigest()


def conversions(folder: Path, gigabytes: float, rounds: int, cores: list[int]) -> dict:
    source, mcore, out = (folder / name for name in ("hf", "mcore", "out"))
    touch(int(3.5e9 * gigabytes))
    size = make(source, qwen(int(gigabytes * 1e9)))
    forward = [*RESHARD, "hf-to-mcore", str(source), str(out), *QWEN, "--no-sync"]
    backward = [*RESHARD, "mcore-to-hf", str(mcore), str(out), "--no-sync"]
    at_once = f"mkdir {out} && ls -S {source}/* | xargs -P 8 -I@ cp @ {out}/"
    commands = {
        "cp -r": ["cp", "-r", str(source), str(out)],
        "eight cp": ["bash", "-c", at_once],
        "hf-to-mcore": forward,
        "mcore-to-hf": backward,
        "diff": [*RESHARD, "diff", str(source), str(mcore)],
        "check": [*RESHARD, "check", str(mcore)],
    }
    everything = os.cpu_count() or 1
    timed([str(mcore) if part == str(out) else part for part in forward], everything)
    manifests: dict[str, set[str]] = {"hf-to-mcore": {manifest_of(mcore)}, "mcore-to-hf": set()}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks = {}
    for index in range(rounds):
        names = list(commands)
        for name in names[index % len(names) :] + names[: index % len(names)]:  # nobody is always last
            command = commands[name]
            seconds[name].append(timed(command, everything)[0])
            if name in manifests:
                manifests[name].add(manifest_of(out))
            shutil.rmtree(out, ignore_errors=True)
    for name in ("hf-to-mcore", "mcore-to-hf"):  # apart: looking at the memory takes time
        peaks[name] = timed(commands[name], everything, memory=True)[1]
        shutil.rmtree(out)
    by_cores: dict[int, dict[str, float]] = {}
    for n in cores:
        by_cores[n] = {}
        for name in ("eight cp", "hf-to-mcore", "mcore-to-hf"):
            by_cores[n][name] = round(timed(commands[name], n)[0], 3)
            if name in manifests:
                manifests[name].add(manifest_of(out))
            shutil.rmtree(out)
        print(n, by_cores[n], flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": size,
        "seconds": {n: [round(s, 3) for s in v] for n, v in seconds.items()},
        "gb_per_second": {n: round(size / s / 1e9, 2) for n, s in medians.items()},
        "rate_over_eight_cp": {n: round(medians["eight cp"] / s, 3) for n, s in medians.items()},
        "peak_anonymous_bytes": peaks,
        "seconds_by_cores": by_cores,
        "one_manifest": {n: len(m) == 1 for n, m in manifests.items()},
    }


def deepseek(folder: Path, layers: int, thrown_away: bool, cores: list[int]) -> dict:
    source, out = folder / "fp8", folder / "out"
    config = MODELS["deepseek-v3"] | {"num_hidden_layers": layers, "first_k_dense_replace": 1}
    touch(int(28e9 * layers))
    size = make(source, config, fp8=True)
    found: dict = {"layers": layers, "read_bytes": size, "seconds_by_cores": {}}
    layout = ["--tp", "8", "--ep", "8", "--etp", "1", "--no-sync"]
    manifests = set()
    for n in cores:
        seconds, peak = timed([*RESHARD, "hf-to-mcore", str(source), str(out), *layout], n, memory=True)
        found["seconds_by_cores"][n] = round(seconds, 2)
        found["written_bytes"] = sum(p.stat().st_size for p in out.rglob("*.distcp"))
        found["peak_anonymous_bytes"] = max(found.get("peak_anonymous_bytes", 0), peak)
        manifests.add(manifest_of(out))
        shutil.rmtree(out)
        print(n, found, flush=True)
    found["one_manifest"] = len(manifests) == 1
    shutil.rmtree(source)
    if thrown_away:
        size = make(source, MODELS["deepseek-v3"], fp8=True, holes=True)
        stages = [
            "--pp",
            "16",
            "--num-layers-in-first-pipeline-stage",
            "3",
            "--num-layers-in-last-pipeline-stage",
            "2",
        ]
        command = [
            sys.executable, "-c", THROWN_AWAY, "hf-to-mcore", str(source), str(out), *layout, *stages,
            "--allow-overflow",
        ]  # fmt: skip
        for n in cores[-2:]:
            seconds, peak = timed(command, n, memory=True)
            found[f"all layers, {n} cores"] = {
                "read_bytes": size,
                "seconds": round(seconds, 1),
                "peak_anonymous_bytes": peak,
            }
            shutil.rmtree(out)
            print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--deepseek", type=int, metavar="LAYERS")
    parser.add_argument("--thrown-away", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling every module at every start is no user's lot
    results: dict = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        if options.gigabytes:
            results["qwen3-moe"] = conversions(
                options.folder, options.gigabytes, options.rounds, options.cores
            )
        if options.deepseek:
            results["deepseek-v3"] = deepseek(
                options.folder, options.deepseek, options.thrown_away, options.cores or [os.cpu_count() or 1]
            )
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
