"""A result that is printed says what its command says, in a notebook too."""

import shutil
import subprocess
import sys
from html import unescape

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, VllmLayout, check, diff, estimate_memory, hf_to_mcore, inspect
from reshard.parity import parity
from reshard.plan import plan_refit
from tests.tools.checkpoints import make


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, another that differs in one tensor, and a Megatron checkpoint of which a file was altered."""
    folder = tmp_path_factory.mktemp("printed")
    one = make(folder / "one", "qwen3-moe", torch.float32)
    other = shutil.copytree(one, folder / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    hf_to_mcore(one, folder / "mcore")
    config = folder / "mcore" / "hf" / "config.json"
    config.write_text(config.read_text() + "\n")
    return one, other, folder / "mcore"


def of_command(*arguments: object) -> list[str]:
    """What a command prints, its notes and its verdict with it, sorted."""
    program = [sys.executable, "-m", "reshard.cli.main", *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    said = [
        line.removeprefix("Error: ")
        for line in done.stderr.splitlines()
        if line.startswith(("note: ", "Error: "))
    ]
    return sorted(done.stdout.splitlines() + said)


def test_a_printed_result_is_what_its_command_prints(made, tmp_path):
    one, other, mcore = made
    results = {
        ("diff", one, other): diff(one, other),
        ("diff", one, one): diff(one, one),
        ("check", mcore): check(mcore),
        ("inspect", one): inspect(one),
        ("hf-to-mcore", one, tmp_path / "new", "--dry-run"): hf_to_mcore(one, tmp_path / "new", dry_run=True),
        ("memory", one, "--tp", "2", "--gpu-memory", "H100"): estimate_memory(
            one, MegatronLayout(tp=2), gpu_memory="H100"
        ),
        ("parity", one, other, "--dtype", "fp32", "--random", "2"): parity(one, other, 2, dtype="fp32"),
    }
    for command, result in results.items():
        text = str(result)
        assert sorted(text.splitlines()) == of_command(*command), command
        assert unescape(result._repr_html_()) == f"<pre>{text}</pre>"
    assert not torch.distributed.is_initialized(), "a process of its own is left without a process group"
    forecast = plan_refit(one, MegatronLayout(tp=2), VllmLayout(tp=2))
    planned, said = (
        str(forecast).splitlines(),
        of_command("plan", one, "--trainer", "tp=2", "--engine", "tp=2"),
    )
    assert len(planned) == len(said) and set(planned[:-1]) < set(said), "but for the time that it took"
    [differing, *_] = results.values()
    assert "model.norm.weight: 1 of 64 differ" in str(differing) and "changed: hf/config.json" in str(
        results["check", mcore]
    )
