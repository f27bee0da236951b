"""How long does vLLM take to load? Its own loader from a Hugging Face directory, compared with reshard's from
that and from Megatron checkpoints.

    python -m benchmarks.megatron.serving --folder /dev/shm/serving --gigabytes 31 --tp 2 [--json FILE]

Makes a checkpoint of Qwen3-30B-A3B's shapes with as many layers as fit, converts it to Megatron at TP1 and at
TP2 PP2 EP4, and starts a real engine from each in a process of its own, `rounds` times in turn. Reported are
the seconds that vLLM says it took to load the model (the slowest rank). That it is the same model is tested
(`tests/engines/test_serving.py`).
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.storage.cores import QWEN, make, qwen

ENGINE = """
import sys
from vllm import LLM
if __name__ == "__main__":
    model, load_format, tp = sys.argv[1:]
    LLM(model=model, load_format=load_format, tensor_parallel_size=int(tp), skip_tokenizer_init=True,
        enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.9, disable_log_stats=True)
"""


def started(folder: Path, model: Path, load_format: str, tp: int) -> float:
    """Seconds to load, by vLLM's own word."""
    (folder / "engine.py").write_text(ENGINE, encoding="utf-8")
    command = [sys.executable, str(folder / "engine.py"), str(model), load_format, str(tp)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    seconds = [
        float(found) for found in re.findall(r"Model loading took [\d.]+ GiB.*?([\d.]+) seconds", said)
    ]
    assert done.returncode == 0 and seconds, said[-3000:]
    return max(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=31)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    source, whole, parts = (options.folder / name for name in ("hf", "tp1", "tp2pp2ep4"))
    result: dict = {
        "bytes": make(source, qwen(int(options.gigabytes * 1e9))),
        "tp": options.tp,
        "rounds": options.rounds,
    }
    for place, layout in ((whole, []), (parts, QWEN)):
        command = [
            sys.executable,
            "-m",
            "reshard.cli.main",
            "hf-to-mcore",
            str(source),
            str(place),
            "--no-sync",
        ]
        subprocess.run([*command, *layout], check=True, capture_output=True)
    ways = {
        "vLLM's own, Hugging Face": (source, "auto"),
        "reshard, Hugging Face": (source, "reshard"),
        "reshard, Megatron TP2 PP2 EP4": (parts, "reshard"),
        "reshard, Megatron TP1": (whole, "reshard"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (model, load_format) in ways.items():
            seconds[name].append(started(options.folder, model, load_format, options.tp))
            print(name, seconds[name][-1], flush=True)
    result["seconds"] = seconds
    result["median"] = {name: statistics.median(values) for name, values in seconds.items()}
    print(json.dumps(result, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
