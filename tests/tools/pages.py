"""Run the commands and the Python of the pages, as a reader would who copies them in order.

Each page has a directory of its own. Hub ids lead to a cache without a network: SmolLM2-135M-Instruct
is the trained model, other ids are small random models of their family. `reshard plan` and
`reshard memory` read nothing but a config: for them each id has its published one.

- A ```bash block is run by bash, and must succeed.
- A ```text block right after one is its output, where ``...`` stands for anything.
- A ```python block is executed; blocks of a page share their names.
- A block after the comment ``<!-- not run: REASON -->`` is not run. One that only includes a file of
  ``examples/`` (``--8<--``) is run with that file, by tests/pages/test_examples.py.
"""

import difflib
import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import filelock
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser

from tests.starting import warm

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SMALL_MODELS = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-30B-A3B": "qwen3-moe",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}
TRAINED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
READ_CONFIGS_ONLY = re.compile(r"^reshard (plan|memory)\b", re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: [^>]+-->\s*$")


def pages() -> Sybil:
    """Return what collects the blocks of README.md, Get started and the guides."""
    return Sybil(
        parsers=[
            CodeBlockParser("bash", run_commands),
            CodeBlockParser("text", compare_output),
            CodeBlockParser("python", run_python),
        ],
        path=str(REPOSITORY),
        patterns=[
            "README.md",
            "AGENTS.md",
            "docs/index.md",
            "docs/get-started.md",
            "docs/concepts/*.md",
            "docs/guides/*.md",
            "docs/guides/**/*.md",
        ],
        fixtures=["hub", "page_directory", "python_of_page"],
    )


class PythonOfPage:
    """A Python process that executes the blocks of one page, which share their names.

    A process of its own, since what a page starts (process groups, forks, environment) is not the
    tests'.
    """

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        command = [warm.python_of_pages(environment["HF_HOME"]), "-u", "-c", _EXECUTE_BLOCKS]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, cwd=directory, env=environment, text=True, **pipes)

    def run(self, block: str) -> tuple[bool, str]:
        """Execute a block; return True where it ended without an exception, and what it has printed."""
        self.process.stdin.write(json.dumps(block) + "\n")
        self.process.stdin.flush()
        printed = []
        for line in self.process.stdout:
            if line.startswith(END_OF_BLOCK):
                return line.strip() == f"{END_OF_BLOCK} ok", "".join(printed)
            printed.append(line)
        return False, "".join(printed)

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


END_OF_BLOCK = "=== end of the block:"
_EXECUTE_BLOCKS = f"""
import json, sys, traceback
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    outcome = "ok"
    try:
        exec(compile(json.loads(line), "the page", "exec"), names)
    except BaseException:
        traceback.print_exc()
        outcome = "failed"
    print("\\n{END_OF_BLOCK}", outcome)
"""


def run_python(example) -> str | None:
    """Execute a block of Python; keep its output for the block that shows it."""
    names = example.namespace
    names["output"] = None
    if not is_run(example):
        return None
    succeeded, names["output"] = names["python_of_page"](environment_of(example)).run(example.parsed)
    return None if succeeded else names["output"]


def is_run(example) -> bool:
    """Return False for a block that says why it is not run, and for one that includes an example."""
    before = example.document.text[: example.start]
    included = str(example.parsed).strip().startswith("--8<-- ")
    return not (NOT_RUN.search(before) or included)


def environment_of(example) -> dict[str, str]:
    """Return the environment of a page's commands."""
    published = READ_CONFIGS_ONLY.search(str(example.parsed)) is not None
    hub = str(example.namespace["hub"](published))
    scripts = str(Path(sys.prefix) / "bin")
    path = f"{scripts}:{os.environ['PATH']}"
    if not published:
        path = f"{_commands(Path(warm.python_of_pages(hub)))}:{path}"
    return os.environ | warm.variables_of_pages(hub) | {"PATH": path}


def _commands(python: Path) -> Path:
    """Return the directory of a `reshard` whose imports are done."""
    directory = python.parent / "bin"
    script = directory / "reshard"
    with filelock.FileLock(f"{directory}.lock"):
        if not script.exists():
            directory.mkdir()
            script.write_text(f'#!/bin/sh\nexec "{python}" -m reshard "$@"\n')
            script.chmod(0o755)
    return directory


def run_commands(example) -> str | None:
    """Run a block of commands; keep its output for the block that shows it."""
    example.namespace["output"] = None
    if not is_run(example):
        return None
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.parsed],
        cwd=example.namespace["page_directory"],
        env=environment_of(example),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    example.namespace["output"] = done.stdout
    return None if done.returncode == 0 else f"exit status {done.returncode}:\n{done.stdout}"


def compare_output(example) -> str | None:
    """Compare a block of text with what the commands before it have printed."""
    printed = example.namespace.get("output")
    if printed is None or not is_run(example):
        return None
    example.namespace["output"] = None
    if doctest.OutputChecker().check_output(
        example.parsed, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    ):
        return None
    lines = difflib.unified_diff(
        example.parsed.splitlines(), printed.splitlines(), "the page", "printed", lineterm=""
    )
    return "\n".join(lines)


def make_hub(home: Path, published: bool) -> Path:
    """Make a cache of the hub with the models that pages name, once for all workers."""
    with filelock.FileLock(f"{home}.lock"):
        if not home.exists():
            for name in (TRAINED_MODEL, *SMALL_MODELS):
                folder = snapshot(home, name)
                (folder.parent.parent / "refs").mkdir(parents=True)
                (folder.parent.parent / "refs" / "main").write_text(folder.name)
                _make_model(folder, name, published)
    return home


def snapshot(home: Path, name: str) -> Path:
    """Return the directory of a model in a cache of the hub."""
    return home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / ("0" * 40)


def _make_model(directory: Path, name: str, published: bool) -> None:
    from tests.tools import checkpoints, trained

    if published:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(_published_config(name)))
    elif name == TRAINED_MODEL:
        trained.make(directory)
    else:
        import torch

        checkpoints.make(directory, SMALL_MODELS[name], torch.bfloat16)


def _published_config(name: str) -> dict:
    for line in (
        (REPOSITORY / "tests" / "models" / "published_configs.jsonl").read_text(encoding="utf-8").splitlines()
    ):
        published = json.loads(line)
        if published["name"] == name:
            return published["config"]
    return {}
