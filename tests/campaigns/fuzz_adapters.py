"""LoRA adapters for the fuzzer to spoil, as PEFT writes them; and the judge of what is merged of them."""

import json
import math
import random
import re
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.campaigns.fuzz_subjects import Subject
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors

COMMANDS = ("lora-merge",)
TARGETS = ("q_proj", "o_proj", "down_proj")
RANK = 4
_A = re.compile(r"\.lora_A(?:\.\w+)?\.weight$")
# Of a sum in fp32 that is rounded once more, to bf16.
RELATIVE = 2.0**-7


def adapters(folder: Path) -> list[Subject]:
    """An adapter of three matrices of each layer of a small Llama."""
    base, generator = make(folder / "base", "llama", torch.bfloat16), torch.Generator().manual_seed(0)
    path, weights = folder / "adapter", hf_tensors(base)
    config = LoraConfig(r=RANK, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    config.base_model_name_or_path = str(base)
    config.save_pretrained(path)
    matrices = {}
    for name, weight in weights.items():
        if name.split(".")[-2] in TARGETS:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            matrices[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            matrices[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) / 8
    save_file(matrices, path / "adapter_model.safetensors", {"format": "pt"})
    return [Subject("llama adapter", path, "adapter", False, base, weights, {})]


def forge(rng: random.Random, adapter: Path) -> str:
    """Nothing: an adapter has no checksums."""
    return ""


def judged(command: str, subject: Subject, folder: Path, printed: str) -> tuple[str, str]:
    """Whether what was merged is the base with what the spoiled files say now."""
    spoiled = folder / "spoiled"
    config = json.loads((spoiled / "adapter_config.json").read_bytes())
    matrices = load_file(spoiled / "adapter_model.safetensors")
    expected = dict(subject.truth)
    for key, a in matrices.items():
        if (match := _A.search(key)) is None:
            continue
        b = matrices[key[: match.start()] + key[match.start() :].replace("lora_A", "lora_B")]
        [name] = [
            n for n in subject.truth if f".{key[: match.start()]}".endswith("." + n.removesuffix(".weight"))
        ]
        scale = config["lora_alpha"] / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        expected[name] = subject.truth[name].double() + scale * (b.double() @ a.double())
    got = hf_tensors(folder / "out")
    if got.keys() != expected.keys():
        return "wrong", f"other tensors: {sorted(got.keys() ^ expected.keys())[:3]}"
    unlike = [n for n, want in expected.items() if not _close(got[n].double(), want.double())]
    if unlike:
        return "wrong", f"{unlike[:3]}"
    as_made = load_file(subject.path / "adapter_model.safetensors")
    same = as_made.keys() == matrices.keys() and all(torch.equal(as_made[n], matrices[n]) for n in as_made)
    return ("right" if same else "right for what the files say now"), ""


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    # Each product of fp32 numbers may be rounded, so the error is of the size of the largest, and not of the sum.
    largest = float(want.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(got, want, rtol=RELATIVE, atol=1e-6 * (1 + largest), equal_nan=True)
