"""Chains of deltas for the fuzzer to spoil, with checksums that are wrong then, or forged to be right."""

import contextlib
import json
import random
import shutil
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file

from reshard.delta import save
from reshard.delta.manifests import _checksum
from tests.campaigns.fuzz_subjects import Subject
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors, same

COMMANDS = ("delta-apply", "delta-apply", "delta-apply", "delta-show")


def chains(folder: Path) -> list[Subject]:
    """A chain of two versions of a small Llama, of few changes and of many."""
    base, generator = make(folder / "base", "llama", torch.bfloat16), torch.Generator().manual_seed(0)
    steps, truths = [base], [hf_tensors(base)]
    for share in (0.02, 0.6):
        step = folder / f"step{len(steps)}"
        shutil.copytree(steps[-1], step)
        weights = load_file(step / "model.safetensors")
        for name, weight in weights.items():
            chosen = torch.rand(weight.shape, generator=generator) < share
            weights[name] = torch.where(chosen, weight + 0.25, weight)
        save_file(weights, step / "model.safetensors", {"format": "pt"})
        save(steps[-1], step, folder / "chain")
        steps.append(step)
        truths.append(hf_tensors(step))
    return [
        Subject("llama chain", folder / "chain", "chain", True, base, truths[-1], {}, earlier=truths[:-1])
    ]


def forge(rng: random.Random, chain: Path) -> str:
    """Give a spoiled chain, half of the time, the checksums that belong to what it holds now."""
    if rng.random() < 0.5:
        return ""
    for path in sorted(
        path for path in chain.glob("*.json") if path.is_file()
    ):  # a mutation may make a pipe of one
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
            fields = json.loads(path.read_bytes())
            for entry in fields.get("files", ()):
                file = chain / entry["name"]
                data = file.read_bytes() if file.is_file() else b""
                entry |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
            fields.pop("xxh3_128", None)
            path.write_text(json.dumps(fields | {"xxh3_128": _checksum(fields)}))
    return "; checksums forged"


def judged(command: str, subject: Subject, folder: Path, printed: str) -> tuple[str, str]:
    """Whether what a command made of a spoiled chain is a version of it."""
    if command == "delta-show":
        return ("right", "") if json.loads(printed)["deltas"] is not None else ("wrong", "no list")
    got = hf_tensors(folder / "out")
    differing = [same(got, truth) for truth in (subject.truth, *subject.earlier)]
    if not differing[0]:
        return "right", ""
    return ("right for what the files say now", "") if [] in differing else ("wrong", f"{differing[0][:3]}")
