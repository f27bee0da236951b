"""Conversions between Hugging Face and Megatron by reshard and by others, on a CPU, in one run.

    python -m benchmarks.field.conversions --folder DIR --environments ENVS --make   # once: an environment for each
    python -m benchmarks.field.conversions --folder DIR --environments ENVS --models qwen3-0.6b --rounds 3
        [--cold] [--json FILE]

A checkpoint is made with transformers, with random weights in bf16. Then `rounds` times, in turn: `cp -r`, and for each
system a conversion to ``torch_dist`` and one back from its own result, each by a command of its own, at TP1 in one
process, as the others' ways on a CPU are. Everything that was written is on the disk at the end. The source is in the
page cache, or with ``--cold`` is not. `start` is the time of a command that only imports what the system needs.

Before anything is timed, every output is compared with the source: a Hugging Face directory by safetensors, a
``torch_dist`` checkpoint by torch's own DCP and an oracle that puts Megatron's tensors together by hand. Then one bit
of each output is changed, and the comparison has to find it. Memory is the peak of the anonymous and shared memory of
all processes together (Pss of /proc/PID/smaps_rollup), which leaves out the page cache.
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
from collections.abc import Callable
from pathlib import Path

from benchmarks.field import readers
from benchmarks.field.systems import SYSTEMS, installs
from benchmarks.models import config_of
from benchmarks.storage.convert import REPOSITORY, anonymous_bytes

RESHARD = [sys.executable, "-m", "reshard.cli.main"]
MODELS = {
    "qwen3-0.6b": ("qwen3-8b", 28, {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
                                    "num_key_value_heads": 8, "tie_word_embeddings": True}),
    # Qwen3-30B-A3B's widths and experts.
    "qwen3-moe": ("qwen3-30b-a3b", 1, {"vocab_size": 32768}),
    "tiny-qwen3": ("tiny-qwen3", None, {}),
}  # fmt: skip
KINDS = ("Pss_Anon:", "Pss_Shmem:")


def make(folder: Path, name: str) -> None:
    """Write a checkpoint with transformers, random weights in bf16 and a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    fields = config_of(MODELS[name][0], MODELS[name][1], MODELS[name][2])
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "word": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )


def run(command: list[str], log: Path, output: Path | None = None) -> dict:
    """Run a command, and wait until what it wrote is on the disk; seconds, its CPU's seconds, peak memory and the load
    before it, or the last line with an error that it printed."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} if command[:3] == RESHARD else dict(os.environ)
    load, begin = os.getloadavg()[0], time.perf_counter()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            peak[0] = max(peak[0], anonymous_bytes(process.pid, KINDS))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(process.pid, 0)
    if output is not None and output.exists():
        subprocess.run(["sync", *(str(path) for path in output.rglob("*") if path.is_file())], check=True)
    seconds = time.perf_counter() - begin
    ended.set()
    watcher.join()
    if status:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        errors = [
            line.removeprefix("[rank0]:").strip() for line in lines if "Error" in line or "Exception" in line
        ]
        return {"error": (errors or lines or [f"wait status {status}"])[-1][:300]}
    cpu = used.ru_utime + used.ru_stime
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_bytes": peak[0],
        "load": round(load, 1),
    }


def settle(source: Path, cold: bool) -> None:
    """Give every command the same start: an idle disk, and a source that is in the page cache or is not."""
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while not cold and file.read(1 << 24):
                    pass


def control(different: Callable[[Path, Path], list[str]], source: Path, output: Path, distcp: bool) -> int:
    """Return how many tensors differ after one bit of an output was changed; the bit is put back."""
    readers.spoil(output, distcp)
    found = len(different(source, output))
    readers.spoil(output, distcp)
    return found


def commands_of(environments: Path) -> dict[str, Callable[..., list[str]]]:
    """Return each system's command, by the words ``start``, ``to-megatron`` and ``to-hf`` with their paths."""

    def reshard(what: str, *paths: str) -> list[str]:
        if what == "start":
            return [*RESHARD, "--version"]
        return [*RESHARD, "hf-to-mcore" if what == "to-megatron" else "mcore-to-hf", *paths[:2]]

    found: dict[str, Callable[..., list[str]]] = {"reshard": reshard}
    for system in SYSTEMS:
        python = str(environments / system.name / "bin" / "python")
        found[system.name] = lambda *words, system=system, python=python: system.command(python, *words)
    return found


def words(step: str, reads: Path, output: Path, source: Path) -> list[str]:
    """Return what follows a system's command: the step and its paths, on the way back the original's, too."""
    return [step, str(reads), str(output), *([str(source)] if step == "to-hf" else [])]


def check(source: Path, work: Path, command: Callable[..., list[str]], only_back: bool) -> dict:
    """Convert once in each direction, or only back from reshard's checkpoint, and compare.

    Return the tensors that differ and what the control found, or the error.
    """
    mcore, back = work / "mcore", work / "back"
    if only_back:
        mcore.symlink_to(work.parent / "reshard" / "mcore")
    result: dict = {}
    steps = (
        ("to-megatron", source, mcore, readers.different_megatron, True),
        ("to-hf", mcore, back, readers.different_hf, False),
    )
    for name, reads, output, different, distcp in steps[only_back:]:
        done = run(command(*words(name, reads, output, source)), work / f"{name}.log", output)
        if "error" in done:
            result[name] = done
            break
        result[name] = {
            "different": different(source, output),
            "control": control(different, source, output, distcp),
        }
    return result


def measure(folder: Path, name: str, options: argparse.Namespace) -> dict:
    """Compare all systems with one model."""
    source, work = folder / f"{name}-hf", folder / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if not (source / "model.safetensors").exists():
        make(source, name)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    result: dict = {"model": name, "bytes": size, "systems": {}}
    commands = commands_of(options.environments)
    commands = {system: commands[system] for system in options.systems}
    only_back = [system.name for system in SYSTEMS if system.only_back]
    for system, command in commands.items():
        place = work / system
        place.mkdir()
        result["systems"][system] = found = check(source, place, command, system in only_back)
        if options.as_published and system not in ("reshard", *only_back):
            published = command(*words("to-megatron", source, place / "published", source), "--as-published")
            found["as published"] = run(published, place / "published.log")
        print(name, system, json.dumps(found), flush=True)
    able = [system for system, found in result["systems"].items() if "control" in found.get("to-hf", {})]
    out = work / "out"
    runs: dict[tuple[str, str], list[dict]] = {}
    for _ in range(options.rounds):
        settle(source, options.cold)
        runs.setdefault(("cp", "to-megatron"), []).append(
            run(["cp", "-r", str(source), str(out)], work / "log", out)
        )
        shutil.rmtree(out)
        for system in able:
            runs.setdefault((system, "start"), []).append(run(commands[system]("start"), work / "log"))
            for step, reads in (("to-megatron", source), ("to-hf", work / system / "mcore"))[
                system in only_back :
            ]:
                settle(reads, options.cold)
                done = run(commands[system](*words(step, reads, out, source)), work / "log", out)
                runs.setdefault((system, step), []).append(done)
                shutil.rmtree(out, ignore_errors=True)
    for (system, step), values in runs.items():
        result["systems"].setdefault(system, {}).setdefault(step, {}).update(
            seconds=statistics.median(value["seconds"] for value in values),
            cpu_seconds=statistics.median(value["cpu_seconds"] for value in values),
            all_seconds=[value["seconds"] for value in values],
            load=[value["load"] for value in values],
            peak_bytes=max(value["peak_bytes"] for value in values),
        )
        print(name, system, step, json.dumps(result["systems"][system][step]), flush=True)
    shutil.rmtree(work)
    return result


def table(result: dict) -> str:
    """Return a model's figures as a table."""
    columns = ("system", "to Megatron, s", "x `cp`", "memory, GB", "to Hugging Face, s", "memory, GB", "start, s",
               "lines", "bits")  # fmt: skip
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    copied = result["systems"]["cp"]["to-megatron"]["seconds"]
    lines = {"reshard": 2, "cp": 1} | {system.name: system.lines() for system in SYSTEMS}
    for system, found in result["systems"].items():
        ways = [found.get(way, {}) for way in ("to-megatron", "to-hf")]
        errors = [way["error"] for way in ways if "error" in way]
        if errors:
            rows.append(f"| {system} | not run: `{errors[0]}` | | | | | | {lines[system]} | |")
            continue
        figures = [f"{way['seconds']:.2f} | {way['peak_bytes'] / 1e9:.2f}" if way else " | " for way in ways]
        head, _, tail = figures[0].partition(" | ")
        start = f"{found['start']['seconds']:.2f}" if "start" in found else ""
        differ = [len(way["different"]) for way in ways if "different" in way]
        bits = "" if not differ else "same" if not any(differ) else f"{sum(differ)} tensors differ"
        ratio = f"{ways[0]['seconds'] / copied:.1f}" if ways[0] else ""
        rows.append(
            f"| {system} | {head} | {ratio} | {tail} | {figures[1]} | {start} | {lines[system]} | {bits} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--environments", type=Path, required=True, help="directory of the systems' environments"
    )
    parser.add_argument("--make", action="store_true", help="make the environments, and stop")
    parser.add_argument("--wheels", type=Path, help="directory with a wheel of transformer_engine_torch")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-moe"], choices=list(MODELS))
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["reshard", *(system.name for system in SYSTEMS)],
        help="reshard first",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="the source is not in the page cache")
    parser.add_argument(
        "--as-published", action="store_true", help="also run each without what lets it run here"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.make:
        options.environments.mkdir(parents=True, exist_ok=True)
        for system in SYSTEMS:
            for command in installs(system, options.environments / system.name, options.wheels):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{system.name}: {done.stderr.strip()}")
                    break
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
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
        "models": [],
    }
    for name in options.models:
        results["models"].append(measure(options.folder, name, options))
        print(table(results["models"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
